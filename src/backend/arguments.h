// What our own backends check of a call before anybody waits for it.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string>
#include <vector>

#include "backend/sum.h"

namespace plumb::arguments {

// Who checks: "the shm backend", on a rank that errors call this, of so many.
struct Checker {
  const char* who;
  int rank;
  int size;

  // The one tensor of a call.
  const at::Tensor& one(const std::vector<at::Tensor>& tensors) const;
  // `full` holds as many of `shard` as there are ranks.
  void divide(const at::Tensor& full, const at::Tensor& shard) const;
  void contiguous_on_cpu(const at::Tensor& tensor) const;
  // What an all-to-all brings is of the dtype that it takes.
  void one_dtype(const at::Tensor& input, const at::Tensor& output) const;
  // The splits of an all-to-all, in rows, as numbers of elements; none: equal ones.
  std::vector<int64_t> in_elements(const at::Tensor& tensor, const std::vector<int64_t>& splits) const;
  // Of numbers of `dtype`.
  Reduction reduction(const c10d::ReduceOp& op, at::ScalarType dtype) const;
};

// Nothing for a reduction that we do not have.
std::optional<Reduction> reduction_of(c10d::ReduceOp::RedOpType op);

}  // namespace plumb::arguments

// Collectives with known results, for any c10d backend: every verb once, and random sequences of them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace plumb::testing {

// Where the tensors of a job lie.
enum class Memory { ordinary, shared, mixed };  // mixed: shared on odd ranks

// One collective that every rank computes the result of by itself.
struct Job {
  enum class Verb { all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier };
  Verb verb = Verb::all_reduce;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 1;  // all of an all-reduce or broadcast, else the shard
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
  int root = 0;
  uint32_t salt = 0;  // other data for other salts
  Memory memory = Memory::ordinary;
  bool inside = false;  // the shard is this rank's part of the whole: of what is gathered, or of what is scattered

  at::Tensor input{}, output{};
  c10::intrusive_ptr<c10d::Work> work{};

  void issue(c10d::Backend& backend);
  // Waits, and throws std::runtime_error when the result is not, bit for bit, what it must be, or the input is not any more.
  void finish(c10d::Backend& backend);
};

// Every verb, dtype, reduction and kind of memory, at sizes around every limit of the shm backend.
void drill(c10d::Backend& backend);

// The verbs just below, at and above those limits, and with nothing to carry.
void drill_limits(c10d::Backend& backend);

// `count` random jobs over `groups`, some waited for at once and some later, in another order on each rank.
void soak(const std::vector<c10d::Backend*>& groups, uint32_t seed, int count);

}  // namespace plumb::testing

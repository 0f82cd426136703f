#include "backend/arguments.h"

#include "plumb/error.h"

namespace plumb::arguments {

const at::Tensor& Checker::one(const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() == 1) return tensors[0];
  throw Error(rank, std::string(who) + " takes one tensor per call, not " + std::to_string(tensors.size()));
}

void Checker::divide(const at::Tensor& full, const at::Tensor& shard) const {
  if (full.numel() == shard.numel() * size && full.scalar_type() == shard.scalar_type()) return;
  throw Error(rank, "a full tensor of " + std::to_string(full.numel()) + " " + c10::toString(full.scalar_type()) +
                        " does not hold " + std::to_string(size) + " shards of " + std::to_string(shard.numel()) + " " +
                        c10::toString(shard.scalar_type()));
}

void Checker::contiguous_on_cpu(const at::Tensor& tensor) const {
  if (tensor.is_cpu() && tensor.is_contiguous()) return;
  throw Error(rank, std::string(who) + " takes contiguous CPU tensors; this one is on " + tensor.device().str() +
                        (tensor.is_contiguous() ? "" : " and not contiguous"));
}

void Checker::one_dtype(const at::Tensor& input, const at::Tensor& output) const {
  if (input.scalar_type() == output.scalar_type()) return;
  throw Error(rank, std::string("all_to_all from ") + c10::toString(input.scalar_type()) + " to " +
                        c10::toString(output.scalar_type()) + "; both must have one dtype");
}

std::vector<int64_t> Checker::in_elements(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
  if (tensor.dim() == 0) throw Error(rank, "all_to_all takes tensors with at least one dimension");
  const int64_t rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % size != 0) {
      throw Error(rank, "all_to_all: " + std::to_string(rows) + " rows do not divide by " + std::to_string(size));
    }
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  const int64_t row = rows > 0 ? tensor.numel() / rows : 0;
  int64_t total = 0;
  bool positive = true;
  std::vector<int64_t> result;
  for (int64_t split : splits) {
    positive = positive && split >= 0;
    total += split;
    result.push_back(split * row);
  }
  if (static_cast<int>(splits.size()) != size || total != rows || !positive) {
    throw Error(rank, "all_to_all: the splits do not add up to the " + std::to_string(rows) + " rows");
  }
  return result;
}

Reduction Checker::reduction(const c10d::ReduceOp& op, at::ScalarType dtype) const {
  const auto known = reduction_of(op);
  if (!known) throw Error(rank, std::string(who) + " reduces by sum, avg, max and min only");
  const void* in = nullptr;
  void* out = nullptr;
  try {
    reduce_in_order({&in, 1}, {&out, 1}, 0, dtype, *known);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(rank, std::string(who) + " does not reduce " + c10::toString(dtype) + "; reduce a numeric dtype");
  }
  return *known;
}

std::optional<Reduction> reduction_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return Reduction::sum;
    case c10d::ReduceOp::AVG:
      return Reduction::average;
    case c10d::ReduceOp::MAX:
      return Reduction::maximum;
    case c10d::ReduceOp::MIN:
      return Reduction::minimum;
    default:
      return std::nullopt;
  }
}

}  // namespace plumb::arguments

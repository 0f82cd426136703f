// The c10d face of the `local` backend: checks the arguments, and arrives at the hub.
#include <utility>

#include "plumb/error.h"
#include "world/local.h"

namespace plumb {
namespace {

using c10d::OpType;
using c10d::Work;

class LocalBackend final : public c10d::Backend {
 public:
  LocalBackend(std::shared_ptr<LocalHub> hub, int rank) : Backend(rank, hub->size()), hub_(std::move(hub)) {}

  const std::string getBackendName() const override { return "local"; }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    return start({.op = OpType::ALLREDUCE, .reduction = opts.reduceOp, .inputs = {one(tensors)}});
  }

  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    if (opts.rootRank < 0 || opts.rootRank >= size_) {
      throw Error(rank_,
                  "broadcast from rank " + std::to_string(opts.rootRank) + " in a group of " + std::to_string(size_));
    }
    return start({.op = OpType::BROADCAST, .root = opts.rootRank, .inputs = {one(tensors)}});
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) override {
    divide(input, output);
    return start(
        {.op = OpType::_REDUCE_SCATTER_BASE, .reduction = opts.reduceOp, .inputs = {input}, .outputs = {output}});
  }

  c10::intrusive_ptr<Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                          std::vector<std::vector<at::Tensor>>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor output = one(outputs);
    same_parts(inputs.at(0), output);
    return start({.op = OpType::REDUCE_SCATTER, .reduction = opts.reduceOp, .inputs = inputs[0], .outputs = {output}});
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions&) override {
    divide(output, input);
    return start({.op = OpType::_ALLGATHER_BASE, .inputs = {input}, .outputs = {output}});
  }

  c10::intrusive_ptr<Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                     const c10d::AllgatherOptions&) override {
    const at::Tensor input = one(inputs);
    same_parts(outputs.at(0), input);
    return start({.op = OpType::ALLGATHER, .inputs = {input}, .outputs = outputs[0]});
  }

  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    return start({.op = OpType::ALLTOALL_BASE,
                  .inputs = {input},
                  .outputs = {output},
                  .input_splits = in_elements(input, input_splits),
                  .output_splits = in_elements(output, output_splits)});
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override { return start({.op = OpType::BARRIER}); }

 private:
  c10::intrusive_ptr<Work> start(LocalCall call) {
    for (const auto* tensors : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *tensors) {
        if (!tensor.is_cpu() || !tensor.is_contiguous()) {
          throw Error(rank_, std::string("the local backend takes contiguous CPU tensors; this one is on ") +
                                 tensor.device().str() + (tensor.is_contiguous() ? "" : " and not contiguous"));
        }
      }
    }
    return hub_->arrive(rank_, std::move(call));
  }

  at::Tensor one(const std::vector<at::Tensor>& tensors) const {
    if (tensors.size() != 1) {
      throw Error(rank_, "the local backend takes one tensor per call, not " + std::to_string(tensors.size()));
    }
    return tensors[0];
  }

  void divide(const at::Tensor& full, const at::Tensor& shard) const {
    if (full.numel() == shard.numel() * size_ && full.scalar_type() == shard.scalar_type()) return;
    throw Error(rank_, "a full tensor of " + std::to_string(full.numel()) + " " + c10::toString(full.scalar_type()) +
                           " does not hold " + std::to_string(size_) + " shards of " + std::to_string(shard.numel()) +
                           " " + c10::toString(shard.scalar_type()));
  }

  void same_parts(const std::vector<at::Tensor>& parts, const at::Tensor& shard) const {
    bool same = static_cast<int>(parts.size()) == size_;
    for (const auto& part : parts) {
      same = same && part.numel() == shard.numel() && part.scalar_type() == shard.scalar_type();
    }
    if (!same) throw Error(rank_, "expected " + std::to_string(size_) + " parts of the size and dtype of the shard");
  }

  std::vector<int64_t> in_elements(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
    if (tensor.dim() == 0) throw Error(rank_, "all_to_all takes tensors with at least one dimension");
    const int64_t rows = tensor.size(0);
    if (splits.empty()) {
      if (rows % size_ != 0) {
        throw Error(rank_, "all_to_all: " + std::to_string(rows) + " rows do not divide by " + std::to_string(size_));
      }
      return std::vector<int64_t>(size_, tensor.numel() / size_);
    }
    const int64_t row = rows > 0 ? tensor.numel() / rows : 0;
    int64_t total = 0;
    std::vector<int64_t> result;
    for (int64_t split : splits) {
      total += split;
      result.push_back(split * row);
    }
    if (static_cast<int>(splits.size()) != size_ || total != rows) {
      throw Error(rank_, "all_to_all: the splits do not add up to the " + std::to_string(rows) + " rows");
    }
    return result;
  }

  std::shared_ptr<LocalHub> hub_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_local_backend(std::shared_ptr<LocalHub> hub, int rank) {
  return c10::make_intrusive<LocalBackend>(std::move(hub), rank);
}

}  // namespace plumb

// The c10d face of the `local` backend: checks the arguments, and arrives at the hub.
#include <utility>

#include "backend/arguments.h"
#include "backend/local.h"
#include "plumb/error.h"

namespace plumb {
namespace {

using c10d::OpType;
using c10d::Work;

class LocalBackend final : public c10d::Backend {
 public:
  LocalBackend(std::shared_ptr<LocalHub> hub, int rank) : Backend(rank, hub->size()), hub_(std::move(hub)) {}

  const std::string getBackendName() const override { return "local"; }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    return start({.op = OpType::ALLREDUCE, .reduction = opts.reduceOp, .inputs = {check_.one(tensors)}});
  }

  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    if (opts.rootRank < 0 || opts.rootRank >= size_) {
      throw Error(hub_->name(rank_),
                  "broadcast from rank " + std::to_string(opts.rootRank) + " in a group of " + std::to_string(size_));
    }
    return start({.op = OpType::BROADCAST, .root = opts.rootRank, .inputs = {check_.one(tensors)}});
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) override {
    check_.divide(input, output);
    return start(
        {.op = OpType::_REDUCE_SCATTER_BASE, .reduction = opts.reduceOp, .inputs = {input}, .outputs = {output}});
  }

  c10::intrusive_ptr<Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                          std::vector<std::vector<at::Tensor>>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor output = check_.one(outputs);
    same_parts(inputs.at(0), output);
    return start({.op = OpType::REDUCE_SCATTER, .reduction = opts.reduceOp, .inputs = inputs[0], .outputs = {output}});
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions&) override {
    check_.divide(output, input);
    return start({.op = OpType::_ALLGATHER_BASE, .inputs = {input}, .outputs = {output}});
  }

  c10::intrusive_ptr<Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                     const c10d::AllgatherOptions&) override {
    const at::Tensor input = check_.one(inputs);
    same_parts(outputs.at(0), input);
    return start({.op = OpType::ALLGATHER, .inputs = {input}, .outputs = outputs[0]});
  }

  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    check_.one_dtype(input, output);
    return start({.op = OpType::ALLTOALL_BASE,
                  .inputs = {input},
                  .outputs = {output},
                  .input_splits = check_.in_elements(input, input_splits),
                  .output_splits = check_.in_elements(output, output_splits)});
  }

  c10::intrusive_ptr<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    check_.contiguous_on_cpu(check_.one(tensors));
    return hub_->send(rank_, peer(to), tag, tensors[0]);
  }

  c10::intrusive_ptr<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    check_.contiguous_on_cpu(check_.one(tensors));
    return hub_->receive(rank_, peer(from), tag, tensors[0]);
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override { return start({.op = OpType::BARRIER}); }

 private:
  c10::intrusive_ptr<Work> start(LocalCall call) {
    for (const auto* tensors : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *tensors) check_.contiguous_on_cpu(tensor);
    }
    return hub_->arrive(rank_, std::move(call));
  }

  int peer(int rank) const {
    if (rank >= 0 && rank < size_) return rank;
    throw Error(hub_->name(rank_),
                "a message to or from rank " + std::to_string(rank) + " in a group of " + std::to_string(size_));
  }

  void same_parts(const std::vector<at::Tensor>& parts, const at::Tensor& shard) const {
    bool same = static_cast<int>(parts.size()) == size_;
    for (const auto& part : parts) {
      same = same && part.numel() == shard.numel() && part.scalar_type() == shard.scalar_type();
    }
    if (!same)
      throw Error(hub_->name(rank_), "expected " + std::to_string(size_) + " parts of the size and dtype of the shard");
  }

  const std::shared_ptr<LocalHub> hub_;
  const arguments::Checker check_{"the local backend", hub_->name(rank_), size_};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_local_backend(std::shared_ptr<LocalHub> hub, int rank) {
  return c10::make_intrusive<LocalBackend>(std::move(hub), rank);
}

}  // namespace plumb

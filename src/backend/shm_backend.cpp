// The c10d face of the `shm` backend: checks the arguments, and issues on the ring.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>

#include "backend/arguments.h"
#include "backend/shm_ring.h"
#include "plumb/error.h"

namespace plumb {
namespace {

using c10d::Work;

class ShmBackend final : public c10d::Backend {
 public:
  ShmBackend(std::shared_ptr<ShmHeap> heap, std::shared_ptr<ShmRing> ring, std::chrono::milliseconds timeout)
      : Backend(heap->rank(), heap->size()), heap_(std::move(heap)), ring_(std::move(ring)), timeout_(timeout) {}
  ~ShmBackend() override { ring_->close(); }

  const std::string getBackendName() const override { return "shm"; }
  const std::shared_ptr<ShmHeap>& heap() const { return heap_; }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (!options.device().is_cpu()) throw Error(ring_->me(), "the shm backend has memory on the CPU only");
    const at::Tensor shared = heap_->tensor(size, options);
    return shared.defined() ? shared : at::empty({size}, options);  // carried all the same, through copies
  }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    const at::Tensor tensor = check_.one(tensors);
    return start({.verb = Verb::all_reduce,
                  .reduction = reduction_of(opts.reduceOp, tensor),
                  .input = tensor,
                  .output = tensor,
                  .numel = tensor.numel()});
  }

  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    if (opts.rootRank < 0 || opts.rootRank >= size_) {
      throw Error(ring_->me(),
                  "broadcast from rank " + std::to_string(opts.rootRank) + " in a group of " + std::to_string(size_));
    }
    const at::Tensor tensor = check_.one(tensors);
    return start({.verb = Verb::broadcast,
                  .root = static_cast<int>(opts.rootRank),
                  .input = tensor,
                  .output = tensor,
                  .numel = tensor.numel()});
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) override {
    check_.divide(input, output);
    return start({.verb = Verb::reduce_scatter,
                  .reduction = reduction_of(opts.reduceOp, input),
                  .input = input,
                  .output = output,
                  .numel = output.numel()});
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions&) override {
    check_.divide(output, input);
    return start({.verb = Verb::all_gather, .input = input, .output = output, .numel = input.numel()});
  }

  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    check_.one_dtype(input, output);
    return start({.verb = Verb::all_to_all,
                  .input = input,
                  .output = output,
                  .numel = input.numel(),
                  .input_splits = check_.in_elements(input, input_splits),
                  .output_splits = check_.in_elements(output, output_splits)});
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override { return start({.verb = Verb::barrier}); }

 private:
  c10::intrusive_ptr<Work> start(ShmCall call) {
    for (const at::Tensor* tensor : {&call.input, &call.output}) {
      if (tensor->defined()) check_.contiguous_on_cpu(*tensor);
    }
    return ring_->issue(std::move(call), timeout_);
  }

  // Refused here, before anybody waits for it.
  Reduction reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) const {
    check_.contiguous_on_cpu(tensor);
    return check_.reduction(op, tensor.scalar_type());
  }

  const std::shared_ptr<ShmHeap> heap_;
  const std::shared_ptr<ShmRing> ring_;
  const arguments::Checker check_{"the shm backend", ring_->me(), size_};
  const std::chrono::milliseconds timeout_;
};

}  // namespace

std::shared_ptr<ShmHeap> heap_of(c10d::Backend& backend) {
  auto* shm = dynamic_cast<ShmBackend*>(&backend);
  return shm != nullptr ? shm->heap() : nullptr;
}

c10::intrusive_ptr<c10d::Backend> make_shm_backend(std::shared_ptr<ShmHeap> heap, c10d::Store& store, int64_t serial,
                                                   std::chrono::milliseconds timeout, Names names) {
  auto ring = ShmRing::make(heap, store, serial, std::move(names));
  return c10::make_intrusive<ShmBackend>(std::move(heap), std::move(ring), timeout);
}

}  // namespace plumb

// The c10d face of a communicator.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <span>

#include "backend/arguments.h"
#include "sim/collective.h"
#include "sim/memory.h"

namespace plumb::sim {
namespace {

using c10d::OpType;

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, OpType type, Communicator::Impl::Started started, Tensors kept)
      : Work(rank, type), started_(std::move(started)), kept_(std::move(kept)) {}

  bool isCompleted() override {
    const auto lock = Machine::lock();
    Machine::get().step_if_mine();
    return ended();
  }
  bool isSuccess() const override { return true; }

  // On the device: whatever the current stream does next comes after the collective. For CPU tensors and barriers:
  // the collective has ended.
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    auto lock = Machine::lock();
    Machine& machine = Machine::get();
    if (started_.event.stream < 0 || opType_ == OpType::BARRIER) {
      machine.run_until(started_.device, lock, [&] { return ended(); }, "a collective of all ranks");
      machine.host_learns(machine.host_of(started_.device), started_.meeting->promise->clock);
    }
    if (started_.event.stream >= 0) machine.wait(current_id(started_.device), started_.event);
    lock.unlock();
    kept_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

 private:
  bool ended() const {
    if (started_.event.stream >= 0) return Machine::get().passed(started_.event);
    return started_.meeting->arrived == static_cast<int>(started_.meeting->contributions.size());
  }

  Communicator::Impl::Started started_;
  Tensors kept_;  // memory that travels is not freed before somebody has waited
};

std::string describe(const at::Tensor& tensor) {
  return std::to_string(tensor.numel()) + " " + c10::toString(tensor.scalar_type());
}

at::Tensor part(const at::Tensor& full, int rank, int size) {
  const int64_t count = full.numel() / size;
  return full.view({-1}).narrow(0, rank * count, count);
}

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(std::shared_ptr<Communicator::Impl> communicator, int rank)
      : Backend(rank, communicator->size), communicator_(std::move(communicator)) {}

  const std::string getBackendName() const override { return "sim"; }
  void setTimeout(std::chrono::milliseconds /*timeout*/) override {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = one(tensors);
    const Reduction reduction = reduction_of(options.reduceOp);
    return start(OpType::ALLREDUCE, {"all_reduce",
                                     describe(tensor) + word(reduction),
                                     {tensor},
                                     {tensor},
                                     [reduction](const Contributions& from, const Tensors& to) {
                                       Tensors inputs;
                                       for (const auto& rank : from) inputs.push_back(rank[0]);
                                       reduce(inputs, to[0], reduction);
                                     }});
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = one(tensors);
    const auto root = static_cast<int>(options.rootRank);
    if (root < 0 || root >= size_) {
      throw Error(rank_, "broadcast from rank " + std::to_string(root) + " in a group of " + std::to_string(size_));
    }
    return start(OpType::BROADCAST, {"broadcast",
                                     describe(tensor) + " from rank " + std::to_string(root),
                                     root == rank_ ? Tensors{tensor} : Tensors{},
                                     {tensor},
                                     [root, mine = rank_](const Contributions& from, const Tensors& to) {
                                       if (root != mine) copy_values(to[0], from[root][0]);
                                     }});
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& full, at::Tensor& shard,
                                                 const c10d::AllgatherOptions& /*options*/) override {
    divide("all_gather", full, shard);
    return start(
        OpType::_ALLGATHER_BASE,
        {"all_gather", describe(shard), {shard}, {full}, [size = size_](const Contributions& from, const Tensors& to) {
           for (int r = 0; r < size; ++r) {
             copy_values(part(to[0], r, size), from[r][0].view({-1}));
           }
         }});
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& /*options*/) override {
    const at::Tensor& shard = one(inputs);
    return start(
        OpType::ALLGATHER,
        {"all_gather", describe(shard), {shard}, outputs.at(0), [](const Contributions& from, const Tensors& to) {
           for (size_t r = 0; r < to.size(); ++r) copy_values(to[r], from[r][0]);
         }});
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& shard, at::Tensor& full,
                                                      const c10d::ReduceScatterOptions& options) override {
    divide("reduce_scatter", full, shard);
    const Reduction reduction = reduction_of(options.reduceOp);
    return start(OpType::_REDUCE_SCATTER_BASE,
                 {"reduce_scatter",
                  describe(shard) + word(reduction),
                  {full},
                  {shard},
                  [reduction, rank = rank_, size = size_](const Contributions& from, const Tensors& to) {
                    Tensors inputs;
                    for (const auto& each : from) inputs.push_back(part(each[0], rank, size));
                    reduce(inputs, to[0], reduction);
                  }});
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override {
    const at::Tensor& shard = one(outputs);
    const Reduction reduction = reduction_of(options.reduceOp);
    return start(OpType::REDUCE_SCATTER, {"reduce_scatter",
                                          describe(shard) + word(reduction),
                                          inputs.at(0),
                                          {shard},
                                          [reduction, rank = rank_](const Contributions& from, const Tensors& to) {
                                            Tensors parts;
                                            for (const auto& each : from) parts.push_back(each.at(rank));
                                            reduce(parts, to[0], reduction);
                                          }});
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& /*options*/) override {
    const auto pieces = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
      std::vector<at::Tensor> result;
      int64_t begin = 0;
      for (int r = 0; r < size_; ++r) {
        const int64_t rows = splits.empty() ? tensor.size(0) / size_ : splits.at(r);
        result.push_back(tensor.narrow(0, begin, rows));
        begin += rows;
      }
      if (begin != tensor.size(0)) {
        throw Error(rank_, "all_to_all: the parts hold " + std::to_string(begin) + " of " +
                               std::to_string(tensor.size(0)) + " rows; they must hold them all");
      }
      return result;
    };
    auto to = pieces(output, output_splits);
    auto from = pieces(input, input_splits);
    return alltoall(to, from, {});
  }

  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& /*options*/) override {
    if (static_cast<int>(inputs.size()) != size_ || static_cast<int>(outputs.size()) != size_) {
      throw Error(rank_, "all_to_all takes one tensor for each of the " + std::to_string(size_) + " ranks, not " +
                             std::to_string(inputs.size()) + " and " + std::to_string(outputs.size()));
    }
    return start(OpType::ALLTOALL, {"all_to_all", c10::toString(inputs.front().scalar_type()), inputs, outputs,
                                    [rank = rank_](const Contributions& from, const Tensors& to) {
                                      for (size_t r = 0; r < to.size(); ++r) {
                                        TORCH_CHECK(to[r].numel() == from[r][rank].numel(), "all_to_all: rank ", r,
                                                    " sends ", from[r][rank].numel(), " elements; ", to[r].numel(),
                                                    " are expected");
                                        copy_values(to[r], from[r][rank]);
                                      }
                                    }});
  }

  // Every rank's host arrives before any leaves wait().
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    return start(OpType::BARRIER, {"barrier", "all ranks", {}, {}, nullptr});
  }

 private:
  static Reduction reduction_of(const c10d::ReduceOp& op) {
    if (const auto known = arguments::reduction_of(op)) return *known;
    throw Error("the simulated communicator reduces by sum, average, maximum or minimum");
  }
  static std::string word(Reduction reduction) {
    static const char* const words[] = {", sum", ", average", ", maximum", ", minimum"};
    return words[static_cast<int>(reduction)];
  }
  static void reduce(const Tensors& inputs, const at::Tensor& output, Reduction reduction) {
    std::vector<const void*> from;
    for (const at::Tensor& input : inputs) from.push_back(input.data_ptr());
    void* to = output.data_ptr();
    reduce_in_order(from, std::span<void* const>(&to, 1), output.numel(), output.scalar_type(), reduction);
  }

  const at::Tensor& one(const std::vector<at::Tensor>& tensors) const {
    if (tensors.size() == 1) return tensors.front();
    throw Error(rank_, "the simulated communicator takes one tensor per call, not " + std::to_string(tensors.size()));
  }
  void divide(const char* verb, const at::Tensor& full, const at::Tensor& shard) const {
    if (full.numel() == shard.numel() * size_ && full.scalar_type() == shard.scalar_type()) return;
    throw Error(rank_, std::string(verb) + ": a full tensor of " + describe(full) + " does not hold " +
                           std::to_string(size_) + " shards of " + describe(shard));
  }

  c10::intrusive_ptr<c10d::Work> start(OpType type, const Collective& collective) {
    Tensors kept = collective.inputs;
    kept.insert(kept.end(), collective.outputs.begin(), collective.outputs.end());
    for (const at::Tensor& tensor : kept) {
      if (!tensor.is_contiguous() || tensor.device() != kept.front().device() || !(tensor.is_cpu() || on_sim(tensor))) {
        throw Error(rank_, collective.kind +
                               " takes contiguous tensors of one simulated device, or of the CPU; one is " +
                               (tensor.is_contiguous() ? "on " + tensor.device().str() : "not contiguous"));
      }
    }
    const auto lock = Machine::lock();
    return c10::make_intrusive<SimWork>(rank_, type, communicator_->start(rank_, collective), std::move(kept));
  }

  const std::shared_ptr<Communicator::Impl> communicator_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> Communicator::backend(int rank) const {
  if (rank < 0 || rank >= impl_->size) {
    throw Error("a backend for rank " + std::to_string(rank) + " of communicator '" + impl_->name +
                "' was asked for; it has " + std::to_string(impl_->size) + " ranks");
  }
  return c10::make_intrusive<SimBackend>(impl_, rank);
}

}  // namespace plumb::sim

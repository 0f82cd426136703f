// The three steps of each verb, and the relays that take them.
#include "backend/hierarchy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <utility>

#include "backend/arguments.h"
#include "backend/links.h"
#include "backend/relay.h"
#include "backend/shm_ring.h"
#include "backend/tcp.h"
#include "plumb/error.h"

namespace plumb {
namespace {

using c10d::Work;
using Works = Relay::Works;

// Ended by the last relay.
class Call final : public Work {
 public:
  using Work::Work;
  void end(const std::exception_ptr& failure) { finish(failure); }
};
using CallPtr = c10::intrusive_ptr<Call>;

at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

// For arithmetic: the numbers without the history that a tensor has. It keeps no memory alive.
at::Tensor plain(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor rows_of(const at::Tensor& full, int64_t row, int first, int count) {
  return full.narrow(0, first * row, count * row);
}

// Every machine's rows to every other machine, in one round.
Links::Script block_gather(int machine, const Tiers& tiers, const at::Tensor& full) {
  const int64_t row = full.numel() / tiers.size();
  return [=, begun = false]() mutable -> Links::Round {
    if (std::exchange(begun, true)) return {};
    const auto rows = [&](int m) { return rows_of(full, row, tiers.first[m], tiers.ranks_on(m)); };
    Links::Round round;
    for (int i = 1; i < tiers.machines(); ++i) {
      const int before = (machine + tiers.machines() - i) % tiers.machines();
      round.receives.push_back({before, rows(before)});
      round.sends.push_back({(machine + i) % tiers.machines(), rows(machine)});
    }
    return round;
  };
}

class HierarchyBackend final : public Hierarchy {
 public:
  HierarchyBackend(const c10::intrusive_ptr<c10d::Store>& store, HierarchyOptions options)
      : Hierarchy(options.rank, options.tiers.size()), names_(options.names), tiers_(options.tiers),
        machine_(tiers_.machine_of(rank_)), begin_(tiers_.first[machine_]), local_(tiers_.ranks_on(machine_)),
        heap_(std::move(options.heap)), timeout_(options.timeout), wire_(std::move(options.wire)),
        cargo_(options.cargo), flat_(std::move(options.flat)) {
    if (local_ > 1) {
      const auto own = c10::make_intrusive<c10d::PrefixStore>("machine " + std::to_string(machine_), store);
      const Names here = names_.part(begin_, local_);
      to_first_ = ShmRing::make(heap_, *own, options.serial, here, begin_);
      from_first_ = ShmRing::make(heap_, *own, options.serial + 1, here, begin_);
    }
    if (!first()) return;
    std::vector<int> firsts;
    for (int m = 0; m < tiers_.machines(); ++m) firsts.push_back(names_[tiers_.first[m]]);
    between_ = make_tcp_backend(c10::make_intrusive<c10d::PrefixStore>("between", store), machine_, tiers_.machines(),
                                options.address, options.patience, Names(std::move(firsts)));
    links_ = std::make_unique<Links>(between_, issuing_between_, wire_, cargo_);
  }

  ~HierarchyBackend() override {
    arrive_.stop();
    cross_.stop();
    leave_.stop();
    if (to_first_) to_first_->close();
    if (from_first_) from_first_->close();
  }

  const std::string getBackendName() const override { return "shm+tcp"; }
  const std::shared_ptr<ShmHeap>& heap() const override { return heap_; }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (!options.device().is_cpu()) throw Error(names_[rank_], "the shm+tcp backend has memory on the CPU only");
    const at::Tensor shared = heap_ ? heap_->tensor(size, options) : at::Tensor();
    return shared.defined() ? shared : at::empty({size}, options);  // carried all the same, through copies
  }

  void shutdown() override {
    flat_->shutdown();
    if (between_) between_->shutdown();
  }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions&) override {
    return gather(output, input, 0);
  }
  c10::intrusive_ptr<Work> gather(at::Tensor& full, at::Tensor& shard, uint64_t what) override;

  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) override {
    return flat_->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override { return flat_->barrier(opts); }
  c10::intrusive_ptr<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return flat_->send(tensors, to, tag);
  }
  c10::intrusive_ptr<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return flat_->recv(tensors, from, tag);
  }

 private:
  // What a call does on this rank.
  struct Steps {
    std::function<Works()> inside{};   // at once
    std::function<Works()> between{};  // on the first rank, when that has ended
    std::function<Works()> outside{};  // on the first rank, when that has; on the others, at once
    std::function<void()> finish{};    // when all has
  };
  c10::intrusive_ptr<Work> start(c10d::OpType type, Steps steps);

  bool first() const { return rank_ == begin_; }
  Works sum_inside(const at::Tensor& input, const at::Tensor& sum, Reduction reduction);
  Works in_memory(const std::shared_ptr<ShmRing>& ring, ShmCall call) const {
    if (!ring) return {};
    return {ring->issue(std::move(call), timeout_)};
  }
  // Where others of the machine read it, if it can be.
  at::Tensor scratch(int64_t numel, at::ScalarType dtype) { return allocateTensor(numel, at::TensorOptions(dtype)); }
  // In the type that sums are kept in.
  at::Tensor widened(const at::Tensor& tensor);
  std::function<void()> narrowed(const at::Tensor& wide, const at::Tensor& tensor, Reduction reduction) const;

  const Names names_;
  const Tiers tiers_;
  const int machine_;
  const int begin_;  // the first rank of this machine
  const int local_;  // how many it has
  const std::shared_ptr<ShmHeap> heap_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Wire> wire_;
  const Cargo cargo_;
  const arguments::Checker check_{"the shm+tcp backend", names_[rank_], size_};

  std::shared_ptr<ShmRing> to_first_, from_first_;  // null on a machine of one rank
  const c10::intrusive_ptr<c10d::Backend> flat_;    // between all ranks
  c10::intrusive_ptr<c10d::Backend> between_;       // between the first ranks, on these
  std::mutex issuing_between_;
  std::unique_ptr<Links> links_;  // over it

  std::mutex issuing_;  // one order of calls for both rings and the relays
  Relay arrive_{"plumb_arrive"}, cross_{"plumb_cross"}, leave_{"plumb_leave"};
};

// What the first ranks say of each other is of calls that nobody made.
std::exception_ptr between_machines(const std::exception_ptr& failure, int me) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& e) {
    return std::make_exception_ptr(Error(me, "between the first ranks of machines: " + without_prefix(e.what())));
  } catch (...) {
    return failure;
  }
}

c10::intrusive_ptr<Work> HierarchyBackend::start(c10d::OpType type, Steps given) {
  const CallPtr call = c10::make_intrusive<Call>(rank_, type);
  const auto steps = std::make_shared<Steps>(std::move(given));
  const auto works_of = [](const std::function<Works()>& step) { return step ? step() : Works(); };
  // The next step, if the last went well; a step that throws ends the call.
  const auto next = [call](const std::exception_ptr& failure, const auto& step) {
    if (failure) return call->end(failure);
    try {
      step();
    } catch (...) {
      call->end(std::current_exception());
    }
  };
  const auto end = [=](const std::exception_ptr& failure) {
    next(failure, [&] {
      if (steps->finish) steps->finish();
      *steps = {};  // what it held is the caller's again before he hears of it
      call->end(nullptr);
    });
  };
  std::lock_guard lock(issuing_);
  Works begun = works_of(steps->inside);
  if (!first()) {
    for (auto& work : works_of(steps->outside)) begun.push_back(std::move(work));
    leave_.after(std::move(begun), end);
    return call;
  }
  const auto crossed = [=, this](const std::exception_ptr& failure) {
    next(failure ? between_machines(failure, names_[rank_]) : nullptr,
         [&] { leave_.after(works_of(steps->outside), end); });
  };
  arrive_.after(std::move(begun), [=, this](const std::exception_ptr& failure) {
    next(failure, [&] { cross_.after(works_of(steps->between), crossed); });
  });
  return call;
}

at::Tensor HierarchyBackend::widened(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kHalf && tensor.scalar_type() != at::kBFloat16) return flat(tensor);
  at::Tensor wide = scratch(tensor.numel(), at::kFloat);
  wide.copy_(plain(tensor));
  return wide;
}

std::function<void()> HierarchyBackend::narrowed(const at::Tensor& wide, const at::Tensor& tensor,
                                                 Reduction reduction) const {
  return [=, size = size_] {
    at::Tensor result = plain(wide);
    // Complex numbers part by part, as every backend divides them.
    if (reduction == Reduction::average) (result.is_complex() ? at::view_as_real(result) : result).div_(size);
    if (result.const_data_ptr() != tensor.const_data_ptr()) plain(tensor).copy_(result);
  };
}

// Averages are sums until the end.
Reduction on_the_way(Reduction reduction) { return reduction == Reduction::average ? Reduction::sum : reduction; }

c10d::ReduceOp::RedOpType operation_of(Reduction reduction) {
  return reduction == Reduction::maximum   ? c10d::ReduceOp::MAX
         : reduction == Reduction::minimum ? c10d::ReduceOp::MIN
                                           : c10d::ReduceOp::SUM;
}

// Of this machine's ranks, on its first.
Works HierarchyBackend::sum_inside(const at::Tensor& input, const at::Tensor& sum, Reduction reduction) {
  return in_memory(to_first_, {.verb = Verb::all_reduce,
                               .reduction = reduction,
                               .reader = 0,
                               .input = input,
                               .output = sum,
                               .numel = input.numel()});
}

c10::intrusive_ptr<Work> HierarchyBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceOptions& opts) {
  const at::Tensor tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  const Reduction asked = check_.reduction(opts.reduceOp, tensor.scalar_type());
  const Reduction reduction = on_the_way(asked);
  const at::Tensor wide = widened(tensor);
  Steps steps;
  steps.inside = [=, this] { return sum_inside(wide, wide, reduction); };
  steps.between = [=, this]() -> Works {
    const int64_t others = tiers_.machines() - 1;
    wire_->sent(cargo_, 2, 2 * others, 2 * others * static_cast<int64_t>(wide.nbytes()) / tiers_.machines());
    std::vector<at::Tensor> one{wide};
    c10d::AllreduceOptions options;
    options.reduceOp = operation_of(reduction);
    return {between_->allreduce(one, options)};
  };
  steps.outside = [=, this] {
    return in_memory(from_first_, {.verb = Verb::broadcast, .input = wide, .output = wide, .numel = wide.numel()});
  };
  steps.finish = narrowed(wide, tensor, asked);
  return start(c10d::OpType::ALLREDUCE, std::move(steps));
}

c10::intrusive_ptr<Work> HierarchyBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& opts) {
  check_.divide(input, output);
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  const Reduction asked = check_.reduction(opts.reduceOp, input.scalar_type());
  const Reduction reduction = on_the_way(asked);
  const int64_t row = output.numel();
  const at::Tensor wide = widened(input);
  const at::ScalarType dtype = wide.scalar_type();
  const at::Tensor mine = dtype == output.scalar_type() ? flat(output) : at::empty({row}, dtype);
  const bool sums = first() && local_ > 1;
  const at::Tensor sum = sums ? at::empty({wide.numel()}, dtype) : wide;  // of this machine, for every rank
  const at::Tensor total = sums ? scratch(local_ * row, dtype) : mine;    // of all machines, for this one's ranks
  const at::Tensor received =
      first() ? at::empty({static_cast<int64_t>(tiers_.machines()) * local_ * row}, dtype) : at::Tensor();
  Steps steps;
  steps.inside = [=, this] { return sum_inside(wide, sum, reduction); };
  steps.between = [=, this]() -> Works {
    std::vector<int64_t> sent, expected(tiers_.machines(), local_ * row);
    for (int m = 0; m < tiers_.machines(); ++m) sent.push_back(tiers_.ranks_on(m) * row);
    wire_->sent(cargo_, 1, tiers_.machines() - 1, (size_ - local_) * row * wide.element_size());
    at::Tensor into = received, from = sum;
    return {between_->alltoall_base(into, from, expected, sent)};
  };
  steps.outside = [=, this]() -> Works {
    if (first()) {
      std::vector<const void*> inputs;
      for (int m = 0; m < tiers_.machines(); ++m) {
        inputs.push_back(rows_of(received, local_ * row, m, 1).const_data_ptr());
      }
      void* out = total.data_ptr();
      reduce_in_order(inputs, {&out, 1}, total.numel(), dtype, reduction);
    }
    return in_memory(from_first_,
                     {.verb = Verb::scatter, .input = first() ? total : mine, .output = mine, .numel = row});
  };
  steps.finish = narrowed(mine, output, asked);
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, std::move(steps));
}

c10::intrusive_ptr<Work> HierarchyBackend::gather(at::Tensor& full, at::Tensor& shard, uint64_t what) {
  check_.divide(full, shard);
  check_.contiguous_on_cpu(shard);
  check_.contiguous_on_cpu(full);
  const int64_t row = shard.numel();
  const at::Tensor whole = flat(full), mine = flat(shard), rows = rows_of(whole, row, begin_, local_);
  Steps steps;
  steps.inside = [=, this] {
    if (local_ == 1 && mine.nbytes() > 0 && rows.data_ptr() != mine.data_ptr())
      std::memcpy(rows.data_ptr(), mine.data_ptr(), mine.nbytes());
    return in_memory(
        to_first_, {.verb = Verb::all_gather, .reader = 0, .what = what, .input = mine, .output = rows, .numel = row});
  };
  steps.between = [=, this]() -> Works { return {links_->start(block_gather(machine_, tiers_, whole), what)}; };
  steps.outside = [=, this] {
    return in_memory(from_first_,
                     {.verb = Verb::broadcast, .what = what, .input = whole, .output = whole, .numel = whole.numel()});
  };
  return start(c10d::OpType::_ALLGATHER_BASE, std::move(steps));
}

// On the root's machine it comes from the root, on the others from their first rank.
c10::intrusive_ptr<Work> HierarchyBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                     const c10d::BroadcastOptions& opts) {
  const at::Tensor tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  const int root = static_cast<int>(opts.rootRank);
  if (root < 0 || root >= size_) {
    throw Error(names_[rank_],
                "broadcast from rank " + std::to_string(root) + " in a group of " + std::to_string(size_));
  }
  const int source = tiers_.machine_of(root);
  const at::Tensor memory = flat(tensor);
  ShmCall call{.verb = Verb::broadcast, .input = memory, .output = memory, .numel = memory.numel()};
  Steps steps;
  if (source == machine_) {
    call.root = root - begin_;
    steps.inside = [=, this] { return in_memory(to_first_, call); };
  } else {
    steps.outside = [=, this] { return in_memory(from_first_, call); };
  }
  steps.between = [=, this]() -> Works {
    if (source == machine_) {
      const int64_t sends = std::bit_width(static_cast<unsigned>(tiers_.machines() - 1));
      wire_->sent(cargo_, sends, sends, sends * static_cast<int64_t>(memory.nbytes()));
    }
    std::vector<at::Tensor> one{memory};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return {between_->broadcast(one, options)};
  };
  return start(c10d::OpType::BROADCAST, std::move(steps));
}

}  // namespace

c10::intrusive_ptr<Hierarchy> make_hierarchy(const c10::intrusive_ptr<c10d::Store>& store, HierarchyOptions options) {
  return c10::make_intrusive<HierarchyBackend>(store, std::move(options));
}

Hierarchy* hierarchy_of(c10d::Backend& backend) { return dynamic_cast<Hierarchy*>(&backend); }

}  // namespace plumb

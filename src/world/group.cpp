// The verbs of a group: what they check, how they travel, and how they are waited for.
#include "world/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "backend/round.h"
#include "backend/sum.h"
#include "world/collective.h"
#include "world/world_impl.h"

namespace plumb {

void check_contiguous(const Group::Impl& group, const char* verb, const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  throw Error(group.me(), std::string(verb) + " takes contiguous tensors; this one has sizes " +
                              c10::str(tensor.sizes()) + " and strides " + c10::str(tensor.strides()) +
                              "; pass tensor.contiguous()");
}

void check_parts(const Group::Impl& group, const char* verb, const at::Tensor& full, const at::Tensor& shard) {
  check_contiguous(group, verb, full);
  check_contiguous(group, verb, shard);
  if (full.numel() == shard.numel() * group.size && full.scalar_type() == shard.scalar_type()) return;
  throw Error(group.me(), std::string(verb) + ": a full tensor of " + std::to_string(full.numel()) + " " +
                              c10::toString(full.scalar_type()) + " does not hold " + std::to_string(group.size) +
                              " shards of " + std::to_string(shard.numel()) + " " + c10::toString(shard.scalar_type()) +
                              "; pad the shards to one size");
}

Cargo cargo_of(const Ticket& ticket) {
  return ticket.group == gather_index ? Cargo::gather : ticket.group == data_index ? Cargo::data : Cargo::control;
}

at::Tensor as_real(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach();
  if (plain.dim() == 1 && !plain.is_complex()) return plain;
  return (plain.is_complex() ? at::view_as_real(plain) : plain).view({-1});
}

int64_t padded(const at::Tensor& part) {
  constexpr int64_t alignment = 16;
  return round_up(static_cast<int64_t>(part.nbytes()), alignment);
}

Pending under_way(Group::Impl& group, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> keep, Ticket ticket,
                  Wire::Moment arrival, std::function<void()> finish) {
  {
    std::lock_guard lock(group.issuing);
    group.forget_ended();
    group.pending.emplace_back(work);
  }
  auto end = [weak = group.weak_from_this(), finish = std::move(finish)] {
    if (finish) finish();
    if (const auto alive = weak.lock()) {
      std::lock_guard lock(alive->issuing);
      alive->forget_ended();
    }
  };
  return Pending(std::move(work), group.watch, std::move(keep), std::make_shared<Ticket>(std::move(ticket)), arrival,
                 std::move(end));
}

namespace {

// The memory of a contiguous tensor in a form the backend moves.
at::Tensor as_cargo(const Group::Impl& group, const at::Tensor& tensor) {
  const at::Tensor flat = as_real(tensor);
  return group.any_dtype ? flat : flat.view(at::kByte);
}

// What a collective of the backend's own costs a rank, done as rings and trees do it, or by messages from each to each.
struct Cost {
  int64_t rounds = 0;
  int64_t messages = 0;
  int64_t bytes = 0;

  static Cost ring(const Group::Impl& group, int64_t turns, const at::Tensor& whole) {
    if (group.counts_itself) return {};
    const int64_t steps = turns * (group.size - 1);
    return {rounds_around(group.carriage, turns, group.size), steps,
            steps * static_cast<int64_t>(whole.nbytes()) / group.size};
  }
  static Cost to_each(const Group::Impl& group, const at::Tensor& whole) {
    return {1, group.size - 1, (group.size - 1) * static_cast<int64_t>(whole.nbytes()) / group.size};
  }
  static Cost tree(const Group::Impl& group, int64_t bytes) {
    if (group.counts_itself) return {};
    const int64_t depth = rounds_of_tree(group.size);
    return {depth, depth, bytes * depth};
  }
};

template <class Call>
Pending start(Group::Impl& group, Cost cost, std::vector<at::Tensor> keep, const Call& call,
              std::function<void()> finish = {}) {
  group.watch->check();
  Ticket ticket{.group = group.index, .members = group.members};
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard lock(group.issuing);
    try {
      work = call(*group.backend);
    } catch (const Error&) {
      throw;  // bad arguments
    } catch (...) {
      group.watch->explain(std::current_exception(), Where{.detail = "issuing a collective"}, ticket);
    }
    ticket.number = group.watch->count(group.index);
  }
  if (group.host_memory && !group.counts_itself) cost.rounds = 1;  // everybody reads everybody's
  Wire& wire = *group.watch->wire();
  wire.sent(cargo_of(ticket), cost.rounds, cost.messages, cost.bytes);
  return under_way(group, std::move(work), std::move(keep), std::move(ticket), wire.arrival(cost.rounds, cost.bytes),
                   std::move(finish));
}

// `sent`: for every rank, its part of every sum. Everybody's parts for this rank come, and are summed in rank order.
Pending reduce_here(Group::Impl& group, std::vector<at::Tensor> outs, at::Tensor sent) {
  at::Tensor received = at::empty_like(sent);
  auto sum = [outs, received, size = group.size] {
    const int64_t row = received.numel() / size;
    const char* place = static_cast<const char*>(received.const_data_ptr());
    for (const at::Tensor& out : outs) {
      std::vector<const void*> inputs;
      for (int r = 0; r < size; ++r) inputs.push_back(place + r * row);
      void* output = out.data_ptr();
      reduce_in_order(inputs, std::span<void* const>(&output, 1), out.numel(), out.scalar_type(), Reduction::sum);
      place += padded(out);
    }
  };
  std::vector<at::Tensor> keep = std::move(outs);
  keep.insert(keep.end(), {sent, received});
  std::vector<int64_t> equal;
  return start(
      group, Cost::to_each(group, sent), std::move(keep),
      [&](c10d::Backend& backend) { return backend.alltoall_base(received, sent, equal, equal); }, sum);
}

}  // namespace

Pending::Pending(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Watch> watch, std::vector<at::Tensor> keep,
                 std::shared_ptr<const Ticket> ticket, Wire::Moment arrival, std::function<void()> finish)
    : work_(std::move(work)), watch_(std::move(watch)), keep_(std::move(keep)), ticket_(std::move(ticket)),
      arrival_(arrival), finish_(std::move(finish)) {}
Pending::Pending() = default;
Pending::~Pending() = default;
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;

void Pending::wait(const Where& where) {
  if (!work_) return;
  const auto work = std::move(work_);
  work_.reset();
  const Ticket& ticket = *ticket_;
  if (keep_.empty() || keep_.front().is_cpu()) {
    const Cargo cargo = cargo_of(ticket);
    const Timeline::Scope scope(watch_->timeline(),
                                cargo == Cargo::data     ? tracks::data
                                : cargo == Cargo::gather ? tracks::gathers
                                                         : tracks::control,
                                [&] { return describe(where); });
    watch_->wire()->waited(cargo, !work->isCompleted());
    watch_->wait(*work, where, ticket);
    const auto end = std::chrono::steady_clock::now() + watch_->timeout();
    std::this_thread::sleep_until(std::min(arrival_, end));
    if (arrival_ > end) {
      const auto why = std::make_exception_ptr(std::runtime_error("timed out: PLUMB_SHAPE makes the link so slow"));
      watch_->explain(why, where, ticket);
    }
  } else {
    try {
      work->wait();  // orders the current stream; the host goes on
    } catch (...) {
      watch_->explain(std::current_exception(), where, ticket);
    }
  }
  if (finish_) std::exchange(finish_, {})();
  keep_.clear();
}

void Group::Impl::forget_ended() {
  std::erase_if(pending, [](const auto& weak) {
    const auto work = weak.lock();
    return !work || work->isCompleted();
  });
}

Group::Group() : impl_(std::make_shared<Impl>()) {}
int Group::rank() const { return impl_->rank; }
int Group::size() const { return impl_->size; }

// A backend with a collective under way, or a broken one, blocks in its destructor until its time-out: such a one is
// left to the end of the process. Ours do not.
Group::Impl::~Impl() {
  if (process.left()) {
    leave_to_parent(backend, watch, gathers, meet, met, control_links, gather_links);
    return;
  }
  bool busy = watch && watch->failed();
  for (const auto& weak : pending) {
    const auto work = weak.lock();
    busy = busy || (work && !work->isCompleted());
  }
  const std::string name = backend ? backend->getBackendName() : "local";
  const bool ours = name == "local" || name == "shm" || name == "sim" || name == "tcp" || name == "shm+tcp";
  if (busy && !ours) (void)backend.release();
  if (busy && ours && backend) backend->shutdown();
}

std::shared_ptr<Group::Impl> make_group(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Watch> watch,
                                        int index) {
  auto group = std::make_shared<Group::Impl>();
  const std::string name = backend->getBackendName();
  group->rank = backend->getRank();
  group->size = backend->getSize();
  group->native_reduce_scatter = name != "gloo";
  group->any_dtype = name == "local" || name == "shm" || name == "tcp" || name == "shm+tcp";
  group->carriage = carriage_of(name);
  group->host_memory = name == "shm" || name == "shm+tcp";
  group->counts_itself = name == "shm+tcp";
  group->has_links = Links::offered_by(*backend);
  group->backend = std::move(backend);
  group->watch = std::move(watch);
  group->index = index;
  return group;
}

Pending Group::all_reduce(at::Tensor tensor) {
  check_contiguous(*impl_, "all_reduce", tensor);
  if (size() == 1 || tensor.numel() == 0) return {};
  std::vector<at::Tensor> cargo{as_real(tensor)};
  return start(*impl_, Cost::ring(*impl_, 2, cargo[0]), cargo,
               [&](c10d::Backend& backend) { return backend.allreduce(cargo); });
}

bool Group::messages_are_dear() const {
  if (size() == 1 || impl_->counts_itself) return false;  // machines would send what they could sum first
  return impl_->carriage == Carriage::direct || impl_->host_memory || !impl_->native_reduce_scatter;
}

Pending Group::reduce_scatter(at::Tensor shard, at::Tensor full) {
  check_parts(*impl_, "reduce_scatter", full, shard);
  if (shard.numel() == 0) return {};
  if (size() == 1) {
    if (shard.data_ptr() != full.data_ptr()) shard.detach().view({-1}).copy_(full.detach().view({-1}));
    return {};
  }
  at::Tensor out = as_real(shard);
  at::Tensor in = as_real(full);
  if (impl_->native_reduce_scatter) {
    return start(*impl_, Cost::ring(*impl_, 1, in), {out, in},
                 [&](c10d::Backend& backend) { return backend._reduce_scatter_base(out, in); });
  }
  if (out.is_cpu()) return reduce_here(*impl_, {out}, in.view(at::kByte));
  at::Tensor parts = at::empty_like(in);
  auto sum = [out, parts, size = size()]() mutable {
    const at::Tensor rows = parts.view({size, -1});
    const auto wide = c10::promoteTypes(out.scalar_type(), at::kFloat);
    at::Tensor total = rows[0].to(out.is_floating_point() ? wide : out.scalar_type(), /*non_blocking=*/true, true);
    for (int r = 1; r < size; ++r) total.add_(rows[r]);
    out.copy_(total);
  };
  at::Tensor received = parts.view(at::kByte);
  at::Tensor sent = in.view(at::kByte);
  std::vector<int64_t> equal;
  return start(
      *impl_, Cost::to_each(*impl_, in), {out, in, parts},
      [&](c10d::Backend& backend) { return backend.alltoall_base(received, sent, equal, equal); }, std::move(sum));
}

Pending Group::reduce_scatter(const std::vector<Part>& parts) {
  if (parts.size() == 1) return reduce_scatter(parts[0].shard, parts[0].full);
  if (size() == 1) {
    for (const Part& part : parts) reduce_scatter(part.shard, part.full);
    return {};
  }
  int64_t row = 0;  // bytes for one rank
  for (const Part& part : parts) {
    check_parts(*impl_, "reduce_scatter", part.full, part.shard);
    row += padded(part.shard);
  }
  if (row == 0) return {};
  std::vector<at::Tensor> outs;
  const at::Tensor sent = at::empty({size() * row}, at::kByte);
  auto* place = static_cast<char*>(sent.mutable_data_ptr());
  for (const Part& part : parts) {  // of host memory, as messages that are dear are
    TORCH_INTERNAL_ASSERT(part.full.is_cpu());
    const auto bytes = static_cast<size_t>(part.shard.nbytes());
    const auto* full = static_cast<const char*>(part.full.const_data_ptr());
    for (int r = 0; r < size() && bytes > 0; ++r) std::memcpy(place + r * row, full + r * bytes, bytes);
    outs.push_back(as_real(part.shard));
    place += padded(part.shard);
  }
  return reduce_here(*impl_, std::move(outs), sent);
}

at::Tensor Group::all_to_all(const at::Tensor& full, const Where& where) {
  check_contiguous(*impl_, "all_to_all", full);
  at::Tensor parts = at::empty_like(full);
  if (size() == 1 || full.numel() == 0) return parts.copy_(full);
  at::Tensor sent = as_cargo(*impl_, full);
  at::Tensor received = as_cargo(*impl_, parts);
  std::vector<int64_t> equal;
  start(*impl_, Cost::to_each(*impl_, full), {parts, full}, [&](c10d::Backend& backend) {
    return backend.alltoall_base(received, sent, equal, equal);
  }).wait(where);
  return parts;
}

Pending Group::all_gather(at::Tensor full, at::Tensor shard) {
  check_parts(*impl_, "all_gather", full, shard);
  if (shard.numel() == 0) return {};
  if (size() == 1) {
    if (shard.data_ptr() != full.data_ptr()) full.detach().view({-1}).copy_(shard.detach().view({-1}));
    return {};
  }
  at::Tensor out = as_cargo(*impl_, full);
  at::Tensor in = as_cargo(*impl_, shard);
  return start(*impl_, Cost::ring(*impl_, 1, out), {out, in},
               [&](c10d::Backend& backend) { return backend._allgather_base(out, in); });
}

Pending Group::broadcast(at::Tensor tensor, int root) {
  check_contiguous(*impl_, "broadcast", tensor);
  if (root < 0 || root >= size()) {
    throw Error(impl_->me(),
                "broadcast from rank " + std::to_string(root) + " in a group of " + std::to_string(size()));
  }
  if (size() == 1 || tensor.numel() == 0) return {};
  std::vector<at::Tensor> cargo{as_cargo(*impl_, tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return start(*impl_, Cost::tree(*impl_, static_cast<int64_t>(tensor.nbytes())), cargo,
               [&](c10d::Backend& backend) { return backend.broadcast(cargo, options); });
}

Pending Group::barrier() {
  if (size() == 1) return {};
  return start(*impl_, Cost::tree(*impl_, 0), {}, [](c10d::Backend& backend) { return backend.barrier(); });
}

bool Group::owns_memory(c10::Device device) const {
  return impl_->backend && device.is_cpu() == impl_->host_memory && impl_->backend->supportsTensorAlloc(device.index());
}

at::Tensor Group::allocate(int64_t numel, const at::TensorOptions& options) const {
  if (owns_memory(options.device())) return impl_->backend->allocateTensor(numel, options);
  return at::empty({numel}, options);
}

}  // namespace plumb

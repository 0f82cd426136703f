// The end of a step: everything that is not reduced yet is, after all ranks agreed that they are at the same point.
#include <algorithm>

#include "grad/reducer.h"

namespace plumb {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

constexpr size_t kSmallSpare = 1 << 20;  // bytes that may stay between steps

}  // namespace

void Reducer::settle_step() {
  Lock lock(mutex_);
  check_alive();
  check_nothing_put_off();
  if (delivering_) throw Error(world_.rank(), "step() after delivered gradients; call end_pass() first");
  if (open_) throw Error(world_.rank(), "step() was called inside a backward; call it after backward() has returned");
  failure_ = nullptr;
  // step() may be called on another stream than the backwards.
  for_devices([this](c10::Device device) { callers_.join(device); });
  for (Bucket& bucket : buckets_) bucket.lanes.begin_all(bucket.device());
  untangle();
  renew_kept();
  std::vector<bool> late;
  for (Bucket& bucket : buckets_) {
    for (Sink* sink : bucket.sinks) {
      sink->given = false;
      sink->taken = 0;
    }
    const bool elsewhere =
        std::any_of(bucket.sinks.begin(), bucket.sinks.end(), [](const Sink* sink) { return sink->grad_elsewhere(); });
    late.push_back(((held_ && (!shards_gradient_ || deterministic_)) || elsewhere) &&
                   fault != Fault::consume_unreduced);
  }
  const Where where = here(Where::Kind::step);
  std::vector<Facts> all;
  try {
    all = agree(Where::Kind::step, late);
    check_changes(all);
    check_factors(all);
    join_late(all, late);
    if (deterministic_) check_shares();
    admit_newcomers(all, late);
    reduce_and_wait(late, where);
  } catch (const std::exception& error) {
    broken_ = error.what();
    throw;
  }
  if (failure_) std::rethrow_exception(failure_);
  if (fault == Fault::consume_unreduced) {
    for (Bucket& bucket : buckets_) make_gradient(bucket);
  }
  held_ = false;
  for (Sink& sink : sinks_) {
    if (late[sink.slot.bucket]) continue;
    for (size_t rank = 1; rank < all.size(); ++rank) {
      const auto index = static_cast<size_t>(sink.index);
      if (all[rank].used[index] == all[0].used[index]) continue;
      const bool first = all[0].used[index];
      throw Error(world_.rank(), "parameter '" + sink.name + "' has " + (first ? "a" : "no") +
                                     " gradient on rank 0 and " + (first ? "none" : "one") + " on rank " +
                                     std::to_string(rank) + " at step(); set or clear gradients alike on every rank");
    }
  }
  adopt(all);
  for (Sink& sink : sinks_) {
    // The user may have changed a tensor that is not the view since its reduction.
    if (sink.grad_mirrored()) sink.settle();
  }
}

void Reducer::finish_step() {
  Lock lock(mutex_);
  for (Bucket& bucket : buckets_) bucket.lanes.end_all(bucket.device());
  // The next forward reads the parameters where the backwards were called.
  for_devices([this](c10::Device device) { callers_.follow(device); });
  callers_.clear();
  remember_parameters();
  ++steps_;
  passes_ = 0;
  std::erase_if(spares_, [](const at::Tensor& spare) { return spare.nbytes() > kSmallSpare; });
}

}  // namespace plumb

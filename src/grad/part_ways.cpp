// Ranks that gather different units: what a backward waits for then, and what it does for the others when it has ended.
#include "grad/reducer.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

// A wait inside of a backward may be for a rank that needs this one's shards first: one with more to do in a hook, say. Where waits
// are the device's, the host goes on and answers, until ranks part or the backward has ended: then a stream that waits would hold up
// its own gathers.
bool Reducer::may_be_asked_while_it_waits() {
  const auto units = gathering.lock();
  if (!units || !units->asks() || buckets_.all().empty()) return false;
  return buckets_.all().front().device().is_cpu() || shard().messages_are_dear();
}

// Others may still gather what their backwards need, of a rank whose own failed, or had less to do. After that all are at the same
// point again, and the next backward's reductions overlap with it as ever.
void Reducer::serve_gathers(const Where& where) {
  Lock lock(mutex_);
  if (pass_ || stopped_ || !broken_.empty()) return;  // nobody meets here
  if (const auto units = gathering.lock(); units && units->asks()) or_break([&] { units->serve(where); });
  summing_->never_wait(false);
  traffic_.hold(false);
}

Reducer::Progress Reducer::progress() const {
  return {2 * passes_ + (pass_ ? 1 : 0), static_cast<int64_t>(traffic_.launched())};
}

void Reducer::part_ways(int64_t launched) {
  Lock lock(mutex_);
  summing_->never_wait(true);
  traffic_.hold(true);
  if (!pass_ || pass_->sync != OpenPass::Sync::reduced || pass_->rules_changed) return;
  traffic_.launch_up_to(static_cast<size_t>(launched), here(Where::Kind::backward));
}

}  // namespace plumb

// The end of a step: everything that is not reduced yet is, after all ranks agreed that they are at the same point.
#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "grad/reducer.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

void Reducer::settle_step() {
  Lock lock(mutex_);
  check_alive();
  if (pass_ && pass_->end == OpenPass::End::told)
    throw Error(team_.rank(), "step() after delivered gradients; call end_pass() first");
  if (pass_)
    throw Error(team_.rank(), "step() was called inside a backward or engine.pass(); call it after both have ended");
  check_captured();
  // step() may be called on another stream than the backwards.
  buckets_.for_devices([this](c10::Device device) { callers_.join(device); });
  for (Bucket& bucket : buckets_) bucket.lanes.begin_all(bucket.device());
  // What this rank alone finds is told to the others before anything is summed.
  std::exception_ptr refusal;
  try {
    check_nothing_put_off("step()");
    buckets_.take_back(members_.sinks());
    changes_.look_at_gradients(sinks(), held_, absence_.now());
    buckets_.untangle(members_.sinks());
    buckets_.renew_kept();
    summing_->check_step(passes_, sinks());
  } catch (...) {
    refusal = std::current_exception();
  }
  for (Sink& sink : members_.sinks()) sink.forget_contributions();
  std::vector<bool> late;
  for (const Bucket& bucket : buckets_) late.push_back(waits_for_step(bucket) && fault != Fault::consume_unreduced);
  Agreement all;
  or_break([&] {
    serve_gathers(here(Where::Kind::step, kOthersGather));
    all = exchange_facts(Where::Kind::step, late, refusal != nullptr);
    if (all.any.failed) return;
    changes_.check_gradients(sinks(), all);
    changes_.check_parameters(sinks(), all, here(Where::Kind::step, "the parameters that were changed"));
  });
  if (refusal) std::rethrow_exception(refusal);
  check_nobody_failed(team_.rank(), all);
  summing_->check_passes(passes_);
  or_break([&] {
    weights_.add(all);
    join_late(all, late);
    admit_newcomers(all, late, false);
    traffic_.reduce_and_wait(late, here(Where::Kind::step));
  });
  if (auto failure = summing_->take_failure()) std::rethrow_exception(failure);
  if (fault == Fault::consume_unreduced) {
    for (Bucket& bucket : buckets_) buckets_.make_gradient(bucket);
  }
  held_ = false;
  for (Bucket& bucket : buckets_) bucket.made_up = false;  // what was cleared since waits for nothing, either
  for (Sink& sink : members_.sinks()) {
    if (late[sink.slot.bucket]) {
      sink.adopt(all.used_anywhere(sink.index));
    } else {
      check_used_alike(sink, all);
      if (sink.grad_mirrored()) sink.settle();  // the user may have changed it since its reduction
    }
  }
  for (Bucket& bucket : buckets_) bucket.frozen = all.every.idle[static_cast<size_t>(bucket.index)];
}

void Reducer::weigh(double weight) {
  Lock lock(mutex_);
  if (backward::listen(shared_from_this())) ++pass_->backwards;
  const bool first = !std::exchange(pass_->weighted, true);
  if (first) weights_.begin_pass(passes_);
  check_weighed_alike(*pass_);
  // Later ones of a pass do not look: its gradients may be on their way.
  if (first) weights_.join(sinks());
  weights_.weigh(weight);
}

// Told where it happens: the pass fails, and with it every rank's.
void Reducer::check_weighed_alike(const OpenPass& pass) const {
  if (!pass.weighted || !pass.unweighted) return;
  throw Error(team_.rank(),
              "backwards with and without a weight in one engine.pass(), whose sums have no common mean; give every "
              "backward of the pass a weight (0 where there is nothing to contribute), or none");
}

double Reducer::take_weight_factor() {
  Lock lock(mutex_);
  return weights_.take_factor();
}

// Its gradients are not the ranks' mean: they were held, or the user's own tensors replaced them.
bool Reducer::waits_for_step(const Bucket& bucket) const {
  const bool held = (held_ || bucket.made_up) && summing_->holds_in_buckets();
  const bool idle = bucket.frozen && !bucket.wanted();
  const auto waits = [](const Sink* sink) { return sink->grad_elsewhere() || sink->apart.defined(); };
  return (held && !idle) || std::ranges::any_of(bucket.sinks, waits);
}

void Reducer::check_used_alike(const Sink& sink, const Agreement& all) const {
  const auto index = static_cast<size_t>(sink.index);
  if (all.any.used[index] == all.every.used[index]) return;
  const bool first = all.everybody[0].used[index];
  for (size_t rank = 1; rank < all.everybody.size(); ++rank) {
    if (all.everybody[rank].used[index] == first) continue;
    throw Error(team_.rank(), "parameter '" + sink.name + "' has " + (first ? "a" : "no") + " gradient on rank 0 and " +
                                  (first ? "none" : "one") + " on rank " + std::to_string(rank) +
                                  " at step(); set or clear gradients alike on every rank");
  }
}

void Reducer::begin_layout() {
  Lock lock(mutex_);
  follows_layout_ = true;
}

// Those of this try are in the gradients, and so are their weights.
void Reducer::refuse_step() {
  Lock lock(mutex_);
  if (!options_.deterministic) return;
  passes_ = 0;
  weights_.end_step();
}

void Reducer::begin_update() {
  Lock lock(mutex_);
  updating_ = true;
}

void Reducer::finish_step() {
  Lock lock(mutex_);
  updating_ = false;
  for (Bucket& bucket : buckets_) bucket.lanes.end_all(bucket.device());
  // The next forward reads the parameters where the backwards were called.
  buckets_.for_devices([this](c10::Device device) { callers_.follow(device); });
  callers_.clear();
  remember_parameters();
  gradients_agreed();
  summing_->finish_step();
  weights_.end_step();
  ++steps_;
  passes_ = 0;
  road_.enter(steps_);
}

void Reducer::check_between_steps(const std::string& what, Cleared cleared) const {
  Lock lock(mutex_);
  check_alive();
  if (!pass_ && passes_ == 0 && !held_) return;
  check_nothing_put_off(what);
  // Backwards whose gradients were all cleared left nothing behind: what is kept of them elsewhere goes with the gradients.
  if (!pass_ && cleared == Cleared::is_enough &&
      std::ranges::none_of(sinks(), [](const Sink& sink) { return sink.grad().defined(); }))
    return;
  throw Error(team_.rank(),
              what + " after " + std::to_string(passes_) +
                  " backwards of a step that has not ended; gradients are not part of a checkpoint: call it "
                  "after step(), before the next backward" +
                  (cleared == Cleared::is_enough ? ", or clear the gradients first (zero_grad)" : ""));
}

std::vector<std::string> Reducer::order() const {
  std::vector<std::string> names;
  for (const Bucket& bucket : buckets_) {
    for (const Sink* sink : bucket.sinks) names.push_back(sink->name);
  }
  return names;
}

void Reducer::resume(int64_t steps) {
  Lock lock(mutex_);
  steps_ = steps;
  follows_layout_ = follows_layout_ || steps > 0;
  passes_ = 0;
  held_ = false;
  for (Bucket& bucket : buckets_) bucket.made_up = false;
  for (Sink& sink : members_.sinks()) sink.apart.reset();
  summing_->forget();
  weights_.forget();
  ledger_.close_step(std::vector<bool>(sinks().size()));
  road_.enter(steps_);
  gradients_agreed();
}

void Reducer::arrange(const std::vector<std::string>& order) {
  Lock lock(mutex_);
  const bool movable = !team_.shards(team_.row().parameter) && (!follows_layout_ || !team_.shards(team_.row().state));
  if (rebuilt_ || !movable) return;
  std::unordered_map<std::string, int> index;
  for (const Sink& sink : sinks()) index[sink.name] = sink.index;
  std::vector<int> indices;
  for (const std::string& name : order) {
    const auto found = index.find(name);
    if (found == index.end()) continue;
    indices.push_back(found->second);
    index.erase(found);
  }
  if (!index.empty()) return;
  rebuilt_ = true;
  buckets_.rebuild(members_.sinks(), indices, here(Where::Kind::rebuild, "the gradients in their saved order"));
  laid_out();
  known_ = {sinks().size(), buckets_.size()};
  gradients_agreed();
}

void Reducer::remember_parameters() { changes_.remember_parameters(sinks()); }

void Reducer::gradients_cleared() {
  Lock lock(mutex_);
  weights_.cleared(pass_ ? std::optional(passes_) : std::nullopt);
  if (!pass_ && !stopped_ && !options_.deterministic) buckets_.let_go();
}

at::Tensor Reducer::full_gradient(const at::Tensor& parameter) {
  Lock lock(mutex_);
  check_alive();
  const Sink* sink = members_.find(parameter);
  if (sink == nullptr) return {};
  Bucket& bucket = buckets_.of(*sink);
  check_reduced("full_gradient of '" + sink->name + "'", &bucket);
  at::NoGradGuard no_grad;
  const Alone alone(bucket.lanes, bucket.device());
  if (!team_.shards_gradient()) return sink->grad().defined() ? sink->grad().detach().clone() : at::Tensor();
  buckets_.make_gradient(bucket);
  const bool piece = sink->grad().defined() && !sink->grad_in_bucket() && sink->grad_is_piece();
  at::Tensor mine = bucket.gradient;
  if (piece && sink->grad().sizes() == sink->view.sizes()) {
    mine = mine.clone();
    mine.narrow(0, sink->view.storage_offset() - bucket.gradient.storage_offset(), sink->view.numel())
        .copy_(unmarked(sink->grad()).reshape(-1));
  }
  const at::Tensor whole = team_.data().allocate(bucket.numel, bucket.gradient.options());
  team_.shard().all_gather(whole, mine).wait(here(Where::Kind::step, "full_gradient of '" + sink->name + "'"));
  if (!sink->grad().defined()) return {};
  if (!sink->grad_in_bucket() && !sink->grad_is_piece()) return sink->grad().detach().clone();
  const at::Tensor gradient = view_in(whole, sink->slot.offset, *sink);
  return gradient.to(sink->rule.bucket, /*non_blocking=*/false, /*copy=*/true);
}

void Reducer::check_reduced(const std::string& what, const Bucket* bucket) {
  Lock lock(mutex_);
  check_alive();
  if (!pass_) buckets_.take_back(members_.sinks());
  if (held_ && options_.deterministic) {
    throw Error(team_.rank(), what + " before step() in deterministic mode, which sums the shares there");
  }
  serve_gathers(here(Where::Kind::step, what));
  const auto made_up = [](const Bucket& one) { return one.made_up; };
  const bool put_off = bucket != nullptr ? bucket->made_up : std::ranges::any_of(buckets_.all(), made_up);
  if (team_.size() == 1 || !(held_ || put_off)) return;
  throw Error(team_.rank(), what + " while gradients of " + (held_ ? "no_sync backwards" : "backward_dw()") +
                                " wait for their reduction; run a backward outside no_sync first");
}

}  // namespace plumb

// The conductor: one gradient, one pass, one step, in the order in which they happen.
#include "grad/reducer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <ranges>

#include "watch/strike.h"
#include "watch/timeline.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

Reducer::Reducer(World world, const NamedTensors& parameters, std::vector<int> unit_of, const Options& options)
    : options_(options), team_(std::move(world), options_),
      ledger_(team_.rank(), options.ledger ? Ledger::Mode::on : Ledger::Mode::off),
      members_(team_.rank(), parameters, std::move(unit_of), options.accumulate_dtype), buckets_(team_, options_),
      summing_(make_summing(team_, buckets_, ledger_, options_)), road_(road_of(team_.world())),
      traffic_(buckets_, *summing_, road_, fault), changes_(team_),
      weights_(team_.rank(), options.deterministic ? Weights::Zeroed::is_kept : Weights::Zeroed::is_cleared) {}

void Reducer::start() {
  backward::install();
  members_.report_to(weak_from_this());
  buckets_.pieces_ask([weak = weak_from_this()](const std::string& what) {
    const auto self = weak.lock();
    if (!self) throw Error(what + " is asked for after its engine has ended");
    return self->ask_about_pieces(what);
  });
  std::vector<int> trainable = members_.newcomers();
  // Gradients come roughly in the reverse order of the model.
  std::reverse(trainable.begin(), trainable.end());
  admit(trainable);
  known_ = {sinks().size(), buckets_.size()};
  remember_parameters();
}

void Reducer::stop() {
  Lock lock(mutex_);
  stopped_ = true;
}

void Reducer::hold_sync(int change) {
  Lock lock(mutex_);
  no_sync_ += change;
}

bool Reducer::holds() const {
  Lock lock(mutex_);
  return held_;
}

bool Reducer::pass_open() const {
  Lock lock(mutex_);
  return pass_.has_value();
}

bool Reducer::has_taken_in() const {
  Lock lock(mutex_);
  return pass_ && std::ranges::any_of(sinks(), &Sink::contributed);
}

bool Reducer::rebuilt() const {
  Lock lock(mutex_);
  return rebuilt_;
}

void Reducer::use_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  Lock lock(mutex_);
  if (pass_) throw Error(team_.rank(), "a communication hook was set inside a backward; set it before");
  summing_->use_hook(std::move(hook));
}

void Reducer::divide_by(int ranks) {
  Lock lock(mutex_);
  summing_->divide_by(ranks);
  divides_by_all_ = ranks == team_.size();
}

void Reducer::sit_out() {
  {
    Lock lock(mutex_);
    // Gradients of its own that nobody has seen yet come first.
    if (!held_ || no_sync_ > 0) absence_.begin(sinks());
  }
  std::exception_ptr failure;
  try {
    begin_backward();
    end_backward(nullptr);
  } catch (...) {
    failure = std::current_exception();
  }
  Lock lock(mutex_);
  if (absence_.now()) absence_.end(sinks());
  if (failure) std::rethrow_exception(failure);
}

void Reducer::check_alive() const {
  if (broken_.empty()) return;
  throw Error(team_.rank(),
              "communication ended with an earlier error; build a new world and engine. It was: " + broken_);
}

void Reducer::or_break(const std::function<void()>& collective) {
  try {
    collective();
  } catch (const std::exception& error) {
    broken_ = error.what();
    throw;
  }
}

// ---- one gradient

at::Tensor Reducer::before_accumulation(Sink& sink, const at::Tensor& gradient) {
  Lock lock(mutex_);
  if (stopped_) return gradient;
  check_alive();
  const bool frozen = !sink.parameter.requires_grad();  // since the forward: autograd drops its gradient
  join_pass(sink, gradient.defined() && !frozen);
  if (gradient.defined() && strikes::flips(team_.rank(), Point::hook)) flip_a_bit(gradient);
  if (on_gradient && gradient.defined() && !frozen) on_gradient(sink, gradient);
  return frozen ? gradient : summing_->accept(*pass_, sink, gradient);
}

// Opens the pass if this is its first gradient, and makes the bucket ready for another contribution.
void Reducer::join_pass(Sink& sink, bool contributes) {
  OpenPass& pass = pass_ ? *pass_ : open_pass();
  road_.pass(Point::hook, steps_, passes_, sink.index);
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != pass.task && task >= 0) {
    pass.task = task;
    if (backward::listen(shared_from_this())) {  // one that has a weight is listened to already
      ++pass.backwards;
      pass.unweighted = true;
      check_weighed_alike(pass);
    }
  }
  Bucket& bucket = buckets_.of(sink);
  // Contract 2: a producer waits for the reduction, and for who wrote the same gradient before.
  bucket.lanes.begin_part(bucket.device(), sink.index);
  // A module that runs again inside this backward (two checkpoints, say) brings a gradient for memory that is on its way.
  if (bucket.launched && fault != Fault::reduce_early) {
    bucket.late = true;
    ledger_.late(bucket.index);
    if (!summing_->may_wait()) return;  // it is kept apart
    summing_->finish(bucket, here(Where::Kind::backward, "a later gradient of '" + sink.name + "'"));
    // It is added to the mean that is there by now, also where this rank had nothing or keeps a tensor of its own.
    if (contributes) {
      sink.adopt(true);
      sink.go_on_alone();
    }
  }
}

void Reducer::after_accumulation(Sink& sink, const at::Tensor& gradient) {
  Lock lock(mutex_);
  if (stopped_ || !pass_ || !sink.parameter.requires_grad()) return;
  // What was delivered is counted: its backward has nothing left for the accumulator.
  if (!gradient.defined() && sink.raw > 0) {
    Bucket& bucket = buckets_.of(sink);
    bucket.lanes.end_part(bucket.device(), sink.index);
    return;
  }
  accumulated(sink, gradient);
}

void Reducer::accumulated(Sink& sink, const at::Tensor& gradient) {
  if (gradient.defined()) {
    ledger_.delivered(sink.index);
    if (!sink.grad().defined()) {
      throw Error(team_.rank(), "parameter '" + sink.name +
                                    "' has no gradient right after one was accumulated: a hook took it away. Gradients "
                                    "must stay until step(); let the engine's optimizer consume them");
    }
    if (fault != Fault::drop_delivery) ++sink.unsettled;
    if (fault == Fault::double_delivery) ++sink.unsettled;
    if (sink.must_settle_now()) summing_->accumulated(sink);
  }
  Bucket& bucket = buckets_.of(sink);
  bucket.lanes.end_part(bucket.device(), sink.index);  // also without a gradient: hooks look at what others wrote
  count_arrival(sink);
}

void Reducer::count_arrival(Sink& sink) {
  Bucket& bucket = buckets_.of(sink);
  pass_->arrivals.push_back(sink.index);
  if (Timeline& timeline = timeline_of(world()); timeline.on()) timeline.mark("gradients", sink.name);
  // A unit's parameters are not needed any more, also where a weight gradient is put off.
  if (++sink.deliveries == sink.expected && bucket.unit >= 0 && on_complete) {
    const auto arrived = [](const Sink* one) {
      return one->deliveries >= one->expected || !one->parameter.requires_grad();
    };
    if (std::ranges::all_of(bucket.sinks, arrived)) on_complete(bucket);
  }
  count_down(sink);
  if (fault == Fault::reduce_early && !bucket.launched && bucket.sinks.size() > 1)
    traffic_.launch(bucket, here(Where::Kind::backward));
  launch_ready();
}

// Its bucket waits for it no longer once everything came that is expected of it, and everything that was put off.
void Reducer::count_down(Sink& sink) {
  if (sink.complete || sink.deliveries < sink.expected || sink.put_off > 0) return;
  sink.complete = true;
  --buckets_.of(sink).waiting;
}

void Reducer::launch_ready() {
  if (pass_->sync == OpenPass::Sync::reduced && !pass_->rules_changed)
    traffic_.launch_ready(here(Where::Kind::backward));
}

void Reducer::accumulator_changed(Sink& sink) {
  Lock lock(mutex_);
  if (!stopped_) members_.follow_accumulator(sink);
}

// ---- one pass

OpenPass::Sync Reducer::sync_of_next() const {
  return summing_->sync(no_sync_ == 0 ? Summing::Wish::reduce : Summing::Wish::hold);
}

OpenPass& Reducer::open_pass() {
  if (updating_ && sync_of_next() == OpenPass::Sync::held) {
    throw Error(team_.rank(), std::string("a backward between begin_step() and end_step() ") +
                                  (options_.deterministic ? "in deterministic mode" : "under no_sync") +
                                  ", whose gradients would wait for a reduction that this step has behind it; run it "
                                  "before begin_step(), or after end_step()");
  }
  if (Timeline& timeline = timeline_of(world()); timeline.on()) timeline.enter(doing::backward, backward::began());
  prepare_capture();
  OpenPass pass;
  pass.sync = sync_of_next();
  // A share is summed as one from the first on: what begins to train is taken in before the ranks can agree on it.
  if (options_.deterministic) {
    if (const std::vector<int> fresh = members_.newcomers(); !fresh.empty()) admit(fresh);
  }
  buckets_.take_back(members_.sinks());
  changes_.look_at_gradients(members_.sinks(), held_, absence_.now());
  buckets_.untangle(members_.sinks());
  ++passes_;
  ledger_.open_pass(steps_, passes_);
  if (on_open) on_open();
  traffic_.restart();
  for (Bucket& bucket : buckets_) {
    bucket.launched = bucket.late = false;
    bucket.waiting = 0;
    for (Sink* sink : bucket.sinks) {
      members_.hook(*sink);
      sink->open_pass();
      sink->complete = !sink->parameter.requires_grad();
      if (!sink->complete) ++bucket.waiting;
    }
  }
  buckets_.renew_kept();
  pass.rules_changed = buckets_.follow_rules();
  if (weights_.carries()) weights_.look(sinks(), passes_);
  summing_->forget_cleared(members_.sinks());
  try {
    summing_->open_pass(pass, passes_, members_.sinks());
  } catch (...) {  // it has not begun
    --passes_;
    throw;
  }
  summing_->never_wait(may_be_asked_while_it_waits());
  return pass_.emplace(std::move(pass));
}

void Reducer::begin_backward() {
  Lock lock(mutex_);
  check_alive();
  if (!pass_) open_pass();
  ++pass_->backwards;
}

void Reducer::end_backward(std::exception_ptr failure) { backward_ended(std::move(failure)); }

void Reducer::backward_ended(std::exception_ptr failure) {
  Lock lock(mutex_);
  if (!pass_) return;
  if (failure && !pass_->failure) pass_->failure = failure;
  if (--pass_->backwards > 0) return;
  OpenPass pass = std::move(*pass_);
  pass_.reset();
  if (stopped_ || !broken_.empty()) return;
  buckets_.for_devices([this](c10::Device device) {
    callers_.add(device);
    follow_caller(device);
  });
  for (Sink& sink : members_.sinks()) {
    if (sink.accumulator) members_.watch(sink);
  }
  try {
    if (pass.sync == OpenPass::Sync::reduced) {
      close_synced_pass(pass);
    } else {
      close_held_pass(pass);
    }
  } catch (...) {
    if (pass.weighted) weights_.failed();
    throw;
  }
  if (pass.weighted) {
    if (!pass.failure) weights_.end_pass(sinks());
    if (pass.failure) pass.dropped ? weights_.drop() : weights_.failed();
  }
  note_capture();
  timeline_of(world()).enter(doing::forward);
  if (pass.failure && !failure) std::rethrow_exception(pass.failure);
}

// Leaves accumulate where backwards are called: no stream waits for another without need, and no graph that is captured
// reaches out of its streams.
void Reducer::follow_caller(c10::Device device) {
  const c10::Stream current = current_stream(device);
  for (Sink& sink : members_.sinks()) {
    if (!sink.accumulator || sink.parameter.device() != device) continue;
    if (sink.accumulator->stream() == current) continue;
    accumulate_on_current(sink.accumulator, sink.parameter);
  }
}

// What is held stays in .grad, or in the sums, where the next reduction finds it.
void Reducer::close_held_pass(OpenPass& pass) {
  serve_gathers(here(Where::Kind::backward, kOthersGather));
  pass.dropped = pass.failure && summing_->drop_held_pass();
  if (pass.dropped) {
    --passes_;
  } else {
    held_ = held_ || !absence_.now();  // an absent rank brings nothing to hold
    summing_->close_held_pass(passes_);
  }
  for (Bucket& bucket : buckets_)
    bucket.lanes.begin_all(bucket.device());  // the caller's stream finds what was written
  if (!pass.failure) pass.failure = summing_->take_failure();
  for (Sink& sink : members_.sinks()) {
    for (; sink.unsettled > 0; --sink.unsettled) ledger_.settled(sink.index);
    sink.remember();
  }
  if (pass.failure) {
    ledger_.abandon_pass();
  } else {
    ledger_.close_pass(Ledger::Sync::held);
  }
}

void Reducer::close_synced_pass(OpenPass& pass) {
  const Where where = here(Where::Kind::backward);
  Agreement all;
  or_break([&] {
    if (pass.rules_changed) {
      serve_gathers(here(Where::Kind::backward, kOthersGather));
      exchange_facts(Where::Kind::backward, std::vector<bool>(buckets_.size()), pass.failure != nullptr);
    }
    const auto units = gathering.lock();
    summing_->never_wait(units && units->asks());
    traffic_.launch_rest(where);
    serve_gathers(here(Where::Kind::backward, kOthersGather));
    if (!pass.failure) pass.failure = summing_->take_failure();
    std::vector<bool> late;
    for (const Bucket& bucket : buckets_) late.push_back(bucket.late || (bucket.frozen && bucket.wanted()));
    summing_->begin_rest(where);
    all = exchange_facts(Where::Kind::backward, late, pass.failure != nullptr);
    traffic_.finish_all(where);
    changes_.check_gradients(members_.sinks(), all);
    join_late(all, late);
    adopt(all);  // before a second reduction: whoever had nothing now holds the mean of the first
    if (divides_by_all_) absence_.make_up(sinks(), all, late);
    for (size_t i = 0; i < late.size(); ++i) {
      if (late[i]) ledger_.late(static_cast<int>(i));
    }
    admit_newcomers(all, late, pass.failure != nullptr);
    if (fault == Fault::reduce_twice) late[0] = true;
    traffic_.reduce_and_wait(late, where);
    adopt(all);
  });
  traffic_.restart();  // up to here it says how much was begun, also to ranks that still gather
  if (!pass.failure) pass.failure = summing_->take_failure();
  held_ = false;
  gradients_agreed();
  if (pass.failure) return ledger_.abandon_pass();
  try {
    check_nobody_failed(team_.rank(), all);
  } catch (const Error&) {
    ledger_.abandon_pass();
    throw;
  }
  ledger_.close_pass(Ledger::Sync::reduced);
  rebuild(pass);
}

// The mean has arrived: .grad is the same gradient on every rank, or its own piece of it.
void Reducer::adopt(const Agreement& all) {
  for (Sink& sink : members_.sinks()) {
    const Bucket& bucket = buckets_.of(sink);
    if (bucket.frozen && !bucket.launched) continue;  // there is nothing yet
    sink.adopt(all.used_anywhere(sink.index));
  }
}

void Reducer::gradients_agreed() {
  buckets_.ranks_met();
  for (Sink& sink : members_.sinks()) {
    sink.contributed = false;
    sink.agreed = sink.grad().defined();
    sink.remember();
  }
}

// ---- the buckets' order

// Happens once: later passes mostly come in the same order. Sharded state stays where it is, and so do the parameters of
// units.
void Reducer::rebuild(const OpenPass& pass) {
  const bool movable = !team_.shards(team_.row().parameter) && (!follows_layout_ || !team_.shards(team_.row().state));
  if (rebuilt_ || !movable) return;
  rebuilt_ = true;
  road_.pass(Point::rebuild, steps_, passes_);
  std::vector<int> order = ready_order(pass);
  if (team_.size() > 1) {
    at::Tensor wire = at::tensor(order, at::kInt);
    or_break([&] { team_.control().broadcast(wire, 0).wait(here(Where::Kind::rebuild, "the order of the buckets")); });
    order.assign(wire.data_ptr<int>(), wire.data_ptr<int>() + wire.numel());
  }
  buckets_.rebuild(members_.sinks(), order, here(Where::Kind::rebuild, "the gradients in their new order"));
  laid_out();
  known_ = {sinks().size(), buckets_.size()};
  gradients_agreed();
}

// In which gradients became ready here, counting each parameter when its last one came; parameters without a gradient keep
// their order behind.
std::vector<int> Reducer::ready_order(const OpenPass& pass) const {
  std::vector<int> order;
  std::vector<bool> placed(sinks().size());
  for (int sink : std::views::reverse(pass.arrivals)) {
    if (!placed[sink]) order.push_back(sink);
    placed[sink] = true;
  }
  std::reverse(order.begin(), order.end());
  for (const Bucket& bucket : buckets_) {
    for (const Sink* sink : bucket.sinks) {
      if (!placed[sink->index]) order.push_back(sink->index);
    }
  }
  return order;
}

void Reducer::admit(const std::vector<int>& candidates) {
  buckets_.add(members_.sinks(), members_.admit(candidates));
  laid_out();
}

void Reducer::laid_out() {
  traffic_.form_convoys(options_.bucket_bytes);
  std::vector<int> bucket_of;
  for (const Sink& sink : sinks()) bucket_of.push_back(sink.slot.bucket);
  ledger_.arrange(members_.names(), bucket_of, static_cast<int>(buckets_.size()));
}

}  // namespace plumb

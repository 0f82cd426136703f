#include "grad/reducer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "layout/digest.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

// ---- one gradient

// Opens the pass if this is its first gradient, and makes the bucket ready for another contribution.
void Reducer::join_pass(Sink& sink, bool contributes) {
  if (!open_) open_pass();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != last_task_ && task >= 0) {
    last_task_ = task;
    if (backward::listen(shared_from_this())) ++attached_;
  }
  // A module that runs again inside this backward (two checkpoints, say) brings a gradient for memory that is on its way.
  Bucket& bucket = buckets_[sink.slot.bucket];
  bucket.lanes.begin_part(bucket.device());  // contract 2: a producer waits for the reduction
  if (bucket.launched && fault != Fault::reduce_early) {
    finish(bucket, here(Where::Kind::backward, "a later gradient of '" + sink.name + "'"));
    bucket.late = true;
    ledger_.late(bucket.index);
    // It is added to the mean that is there by now, also where this rank had nothing or keeps a tensor of its own.
    if (contributes) sink.adopt(true);
  }
}

at::Tensor Reducer::before_accumulation(Sink& sink, const at::Tensor& gradient) {
  Lock lock(mutex_);
  if (stopped_) return gradient;
  check_alive();
  const bool frozen = !sink.parameter.requires_grad();  // since the forward: autograd drops its gradient
  join_pass(sink, gradient.defined() && !frozen);
  if (frozen) return gradient;
  Bucket& bucket = buckets_[sink.slot.bucket];
  if (eaten_) {
    if (gradient.defined()) take(sink, gradient);
    return {};
  }
  if (shards_gradient_ && gradient.defined() && sink.grad_in_bucket()) sink.make_whole(bucket.kept, mesh_.shard);
  return gradient;
}

void Reducer::after_accumulation(Sink& sink, const at::Tensor& gradient) {
  Lock lock(mutex_);
  if (stopped_ || !open_ || !sink.parameter.requires_grad()) return;
  Bucket& bucket = buckets_[sink.slot.bucket];
  if (gradient.defined()) {
    ledger_.delivered(sink.index);
    if (!sink.grad().defined()) {
      throw Error(world_.rank(),
                  "parameter '" + sink.name +
                      "' has no gradient right after one was accumulated: a hook took it away. Gradients "
                      "must stay until step(); let the engine's optimizer consume them");
    }
    if (fault != Fault::drop_delivery) ++sink.unsettled;
    if (fault == Fault::double_delivery) ++sink.unsettled;
    if (sink.must_settle_now()) {
      if (shards_gradient_) {
        sink.grad() = sink.grad().to(sink.rule.bucket).to_dense();
      } else {
        make_gradient(bucket, Blank::padding);
        settle(sink, 1.0);
      }
    }
    bucket.lanes.end_part(bucket.device());
  }
  ready_order_.push_back(sink.index);
  if (++sink.deliveries == sink.expected && --bucket.waiting == 0 && bucket.unit >= 0 && on_complete)
    on_complete(bucket);
  if (fault == Fault::reduce_early && !bucket.launched && bucket.sinks.size() > 1) {
    reduce(bucket);
    send_waiting();
  }
  if (synced_) launch_ready();
}

// ---- one pass

void Reducer::open_pass() {
  open_ = true;
  synced_ = !deterministic_ && (no_sync_ == 0 || (shards_gradient_ && !options_.hold_unsharded));
  eaten_ = deterministic_ || (shards_gradient_ && synced_);
  failure_ = nullptr;
  last_task_ = -1;
  next_ = 0;
  ready_order_.clear();
  ++passes_;
  ledger_.open_pass(steps_, passes_);
  for (Bucket& bucket : buckets_) {
    bucket.launched = bucket.late = false;
    bucket.waiting = 0;
    for (Sink* sink : bucket.sinks) {
      hook(*sink);
      sink->expected = std::max(1, sink->deliveries);
      sink->deliveries = sink->unsettled = sink->taken = 0;
      sink->given = sink->raw = false;
      sink->samples.reset();
      if (sink->parameter.requires_grad()) ++bucket.waiting;
    }
  }
  untangle();
  renew_kept();
  hold_launches_ = follow_rules();
  if (deterministic_) prepare_share();
}

// Contract 3: a leaf's rule may change between passes, and its bucket with it. True if any did: then nothing travels
// before all ranks have said that theirs did too.
bool Reducer::follow_rules() {
  bool changed = false;
  Digest digest;
  for (Bucket& bucket : buckets_) {
    at::ScalarType dtype = grad_rule(bucket.sinks[0]->parameter, options_.accumulate_dtype).bucket;
    for (Sink* sink : bucket.sinks) {
      const GradRule rule = grad_rule(sink->parameter, options_.accumulate_dtype);
      changed = changed || !(rule == sink->rule);
      sink->rule = rule;
      dtype = c10::promoteTypes(dtype, rule.bucket);
      digest.add(rule.cast ? static_cast<uint64_t>(*rule.cast) + 1 : 0);
    }
    if (dtype != bucket.dtype) {
      const Alone alone(bucket.lanes, bucket.device());
      bucket.dtype = dtype;
      renew(bucket);
    }
  }
  rules_ = digest.value();
  return changed;
}

// A .grad that shares memory with somebody's place in a bucket (two gradients swapped by the user, say) gets memory of
// its own before anything is copied.
void Reducer::untangle() {
  for (Sink& sink : sinks_) {
    if (!sink.grad_elsewhere() || !sink.grad().has_storage()) continue;
    for (Bucket& bucket : buckets_) {
      if (!bucket.gradient.defined() || !sink.grad().storage().is_alias_of(bucket.gradient.storage())) continue;
      at::NoGradGuard no_grad;
      if (shards_gradient_ &&
          (sink.grad().sizes() != sink.view.sizes() || sink.grad().const_data_ptr() != sink.view.const_data_ptr())) {
        throw Error(world_.rank(), "the gradient of parameter '" + sink.name +
                                       "' is another parameter's piece; where gradients are sharded, pieces cannot be "
                                       "moved between parameters: assign whole gradients (engine.full_gradient)");
      }
      const Alone there(bucket.lanes, bucket.device());
      const Alone here(buckets_[sink.slot.bucket].lanes, bucket.device());
      sink.grad() = sink.grad().clone();
      break;
    }
  }
}

void Reducer::settle(Sink& sink, double scale) {
  for (int i = 0; i < sink.unsettled; ++i) ledger_.settled(sink.index);
  sink.settle(scale);
}

// The sinks settle here rather than one by one as gradients come: then a gradient is scaled while it is copied, and a
// device copies a whole bucket in one kernel.
void Reducer::reduce(Bucket& bucket) {
  at::NoGradGuard no_grad;
  bucket.launched = true;
  if (fault == Fault::reduce_never && bucket.index == 0) return;
  bucket.under_way = true;
  const c10::Device device = bucket.device();
  const Alone alone(bucket.lanes, device);  // contract 2: a reduction waits for every producer
  if (eats()) return reduce_incoming(bucket);
  make_gradient(bucket, Blank::padding);
  const double mean = 1.0 / data_.size();
  const bool batched = !device.is_cpu();
  if (batched) copy_together(bucket);
  for (Sink* sink : bucket.sinks) {
    try {
      settle(*sink, batched ? 1.0 : mean);
    } catch (...) {
      // The others wait for this reduction all the same; the failure is told when the pass closes.
      if (!failure_) failure_ = std::current_exception();
      sink->view.zero_();
    }
  }
  ledger_.reduced(bucket.index);
  if (data_.size() > 1) {
    if (batched) bucket.gradient.mul_(mean);
    bucket.reduction = std::make_shared<Pending>(data_.all_reduce(bucket.gradient));
  }
}

// Copies every plain gradient of the bucket to its place with one call, and makes the places their .grad.
void Reducer::copy_together(Bucket& bucket) {
  std::vector<at::Tensor> places, gradients;
  for (Sink* sink : bucket.sinks) {
    if (!sink->grad_elsewhere() || sink->must_settle_now() || sink->grad().requires_grad()) continue;
    if (sink->grad().sizes() != sink->view.sizes()) continue;  // settle() says what is wrong with it
    places.push_back(sink->view);
    gradients.push_back(sink->grad());
  }
  if (places.size() < 2) return;
  at::_foreach_copy_(places, gradients);
  for (const at::Tensor& gradient : gradients) keep_for_current(gradient);
  size_t next = 0;
  for (Sink* sink : bucket.sinks) {
    if (next < gradients.size() && sink->grad().defined() && sink->grad().is_same(gradients[next])) {
      sink->grad() = sink->view;
      ++next;
    }
  }
}

void Reducer::begin_backward() {
  Lock lock(mutex_);
  check_alive();
  if (!open_) open_pass();
  ++attached_;
}

void Reducer::end_backward(std::exception_ptr failure) { backward_ended(failure); }

void Reducer::backward_ended(std::exception_ptr failure) {
  Lock lock(mutex_);
  if (!open_) return;
  if (failure && !failure_) failure_ = failure;
  if (--attached_ > 0) return;
  attached_ = 0;
  open_ = false;
  if (stopped_ || !broken_.empty()) return;
  for_devices([this](c10::Device device) {
    callers_.add(device);
    follow_caller(device);
  });
  close_pass(failure != nullptr);
}

// Leaves accumulate where backwards are called: no stream waits for another without need, and no graph that is captured
// reaches out of its streams.
void Reducer::follow_caller(c10::Device device) {
  for (Sink& sink : sinks_) {
    if (!sink.accumulator || sink.parameter.device() != device) continue;
    if (sink.accumulator->stream() == current_stream(device)) return;
    accumulate_on_current(sink.accumulator, sink.parameter);
  }
}

void Reducer::close_pass(bool failure_is_known) {
  if (synced_) {
    close_synced_pass();
  } else {
    held_ = true;
    if (deterministic_) push_shares();
    // What is held stays in .grad, where the next reduction finds it.
    for (Sink& sink : sinks_) {
      for (; sink.unsettled > 0; --sink.unsettled) ledger_.settled(sink.index);
    }
    if (!failure_) ledger_.close_pass(Ledger::Sync::held);
  }
  if (failure_) ledger_.abandon_pass();
  if (failure_ && !failure_is_known) std::rethrow_exception(failure_);
}

void Reducer::close_synced_pass() {
  const Where where = here(Where::Kind::backward);
  std::vector<Facts> all;
  try {
    if (hold_launches_) agree(Where::Kind::backward, std::vector<bool>(buckets_.size()));
    while (next_ < buckets_.size()) launch_convoy();
    std::vector<bool> late;
    for (const Bucket& bucket : buckets_) late.push_back(bucket.late);
    auto finish_all = [&] {
      for (Bucket& bucket : buckets_) {
        Where detailed = where;
        detailed.detail = "the reduction of bucket " + std::to_string(bucket.index);
        finish(bucket, detailed);
      }
    };
    // A reduction over two axes has a second part that begins in finish(): nobody may wait for facts before it.
    if (shards_gradient_ && groups_.replicate.size() > 1) finish_all();
    all = agree(Where::Kind::backward, late);
    finish_all();
    join_late(all, late);
    for (size_t i = 0; i < late.size(); ++i) {
      if (late[i]) ledger_.late(static_cast<int>(i));
    }
    adopt(all);  // before a second reduction: whoever had nothing now holds the mean of the first
    admit_newcomers(all, late);
    if (fault == Fault::reduce_twice) late[0] = true;
    reduce_and_wait(late, where);
    adopt(all);
    for (Sink& sink : sinks_) sink.given = false;
  } catch (const std::exception& error) {
    broken_ = error.what();
    throw;
  }
  held_ = false;
  if (failure_) return;
  throw_if_failed_elsewhere(all);
  ledger_.close_pass(Ledger::Sync::reduced);
  // Sharded state stays where it is, and so do the parameters of units.
  const bool movable = !shards(row_.parameter) && (steps_ == 0 || !shards(row_.state));
  if (!rebuilt_ && movable) rebuild();
  sample_pieces();
}

void Reducer::reduce_and_wait(const std::vector<bool>& which, const Where& where) {
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i]) reduce(buckets_[i]);
  }
  send_waiting();
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i]) finish(buckets_[i], where);
  }
}

void Reducer::adopt(const std::vector<Facts>& all) {
  for (Sink& sink : sinks_) {
    const auto index = static_cast<size_t>(sink.index);
    const bool used = std::any_of(all.begin(), all.end(), [&](const Facts& facts) { return facts.used[index]; });
    sink.adopt(used);
  }
}

// ---- what both ends of a step use

void Reducer::for_devices(const std::function<void(c10::Device)>& call) const {
  std::vector<c10::Device> known;
  for (const Bucket& bucket : buckets_) {
    if (std::find(known.begin(), known.end(), bucket.device()) != known.end()) continue;
    known.push_back(bucket.device());
    if (!bucket.device().is_cpu()) call(bucket.device());
  }
}

void Reducer::hold_sync(int change) {
  Lock lock(mutex_);
  no_sync_ += change;
}

void Reducer::stop() {
  Lock lock(mutex_);
  stopped_ = true;
}

void Reducer::check_alive() const {
  if (!broken_.empty()) {
    throw Error(world_.rank(),
                "communication ended with an earlier error; build a new world and engine. It was: " + broken_);
  }
}

}  // namespace plumb

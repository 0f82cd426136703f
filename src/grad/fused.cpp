// Entrance 2: operations that write a weight gradient themselves write it straight into the bucket.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include "grad/reducer.h"
#include "plumb/fused.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

class BucketSink final : public FusedSink {
 public:
  BucketSink(std::weak_ptr<Reducer> reducer, Sink& sink) : reducer_(std::move(reducer)), sink_(sink) {}

  std::string name() const override { return sink_.name; }
  GradTarget open() override { return alive().open_fused(sink_); }
  void wrote() override { alive().wrote_fused(sink_); }
  void put_off() override { ++sink_.outstanding; }
  void made_up() override { --sink_.outstanding; }

 private:
  Reducer& alive() {
    held_ = reducer_.lock();
    if (!held_) throw Error("the gradient of parameter '" + sink_.name + "' comes after its engine has ended");
    return *held_;
  }

  std::weak_ptr<Reducer> reducer_;
  std::shared_ptr<Reducer> held_;
  Sink& sink_;
};

void Reducer::offer_fused(Sink& sink) {
  if (!sink.parameter.is_contiguous()) return;  // kernels write rows; such a gradient goes through autograd
  sink.entrance = std::make_shared<BucketSink>(weak_from_this(), sink);
  attach(sink.parameter, sink.entrance);
}

bool Reducer::in_pass() const { return delivering_ || torch::autograd::get_current_graph_task_id() >= 0; }

GradTarget Reducer::open_fused(Sink& sink) {
  Lock lock(mutex_);
  at::NoGradGuard no_grad;
  if (stopped_)
    throw Error(world_.rank(), "the gradient of parameter '" + sink.name + "' comes after its engine has ended");
  check_alive();
  const bool in_pass = this->in_pass();
  if (in_pass) join_pass(sink, true);
  Bucket& bucket = buckets_[sink.slot.bucket];
  if (!in_pass) bucket.lanes.begin_part(bucket.device());
  if (in_pass && eaten_) {
    open_incoming(bucket);
    const at::Tensor place = view_in(bucket.incoming, sink.slot.offset, sink.parameter);
    // Kernels know nothing of the mean: this sink's sum is scaled as a whole when the bucket is reduced.
    if (sink.taken > 0 && !sink.raw && !deterministic_) place.mul_(data_.size());
    sink.raw = true;
    return {place, sink.taken > 0};
  }
  if (eats()) {
    // Held on this rank, whole, until the next reduction.
    if (sink.grad_in_bucket()) sink.make_whole(bucket.kept, mesh_.shard);
    const bool fresh = !sink.grad().defined();
    if (fresh) sink.grad() = at::empty_like(sink.parameter, sink.parameter.options().dtype(bucket.dtype));
    return {sink.grad(), !fresh};
  }
  make_gradient(bucket, Blank::padding);
  if (sink.grad_elsewhere() || sink.grad_mirrored()) {
    sink.settle();
    sink.grad() = sink.view;
  }
  return {sink.view, sink.grad().defined()};
}

void Reducer::wrote_fused(Sink& sink) {
  Lock lock(mutex_);
  Bucket& bucket = buckets_[sink.slot.bucket];
  bucket.lanes.end_part(bucket.device());
  const bool in_pass = this->in_pass();
  if (in_pass && eaten_) {
    ++sink.taken;
    sink.given = true;
    ledger_.delivered(sink.index);
    ledger_.settled(sink.index);
    return;
  }
  if (!eats()) sink.grad() = sink.view;
  if (in_pass) {
    ledger_.delivered(sink.index);
    ++sink.unsettled;
    return;
  }
  // A weight gradient that was put off comes between backwards: the next backward, or step(), reduces it.
  held_ = true;
  ledger_.open_pass(steps_, passes_);
  ledger_.delivered(sink.index);
  ledger_.settled(sink.index);
  ledger_.close_pass(Ledger::Sync::held);
}

void Reducer::check_nothing_put_off() const {
  for (const Sink& sink : sinks_) {
    if (sink.outstanding == 0) continue;
    throw Error(world_.rank(), "step() while " + std::to_string(sink.outstanding) + " weight gradient" +
                                   (sink.outstanding == 1 ? "" : "s") + " of parameter '" + sink.name +
                                   "' are put off; call backward_dw() on its module first");
  }
}

}  // namespace plumb

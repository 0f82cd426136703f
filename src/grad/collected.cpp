#include "grad/collected.h"

#include <ATen/ATen.h>

#include <utility>

namespace plumb {

at::Tensor Collected::accept(const OpenPass& pass, Sink& sink, const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_.of(sink);
  if (!collects(pass)) {
    if (gradient.defined()) {
      take_in(sink);
      if (sink.grad_in_bucket()) sink.make_whole(bucket.kept, team_.mesh().shard);
    }
    return gradient;
  }
  if (!gradient.defined()) return {};
  ledger_.delivered(sink.index);
  if (goes_apart(bucket)) {
    sink.collect_apart(gradient, bucket.dtype);
    bucket.lanes.end_part(bucket.device(), sink.index);
    ledger_.settled(sink.index);
    return {};
  }
  open_incoming(bucket);
  const double factor = sink.unscaled ? 1.0 : scale();
  if (!sink.collect_small(gradient, bucket.incoming.sum, factor)) {
    sink.collect(gradient, place_of(bucket, sink), factor);
  }
  bucket.lanes.end_part(bucket.device(), sink.index);
  ledger_.settled(sink.index);
  return {};
}

void Collected::accumulated(Sink& sink) { sink.grad() = sink.grad().to(sink.rule.bucket).to_dense(); }

GradTarget Collected::open_fused(const OpenPass* pass, Sink& sink) {
  Bucket& bucket = buckets_.of(sink);
  if (pass != nullptr && collects(*pass)) {
    if (goes_apart(bucket)) return open_apart(sink, bucket);
    open_incoming(bucket);
    const at::Tensor place = place_of(bucket, sink);
    // Kernels know nothing of the mean: this sink's sum is scaled as a whole when the bucket is reduced.
    if (sink.collected > 0 && !sink.unscaled && scale() != 1.0) place.mul_(team_.size());
    sink.unscaled = true;
    return {place, sink.collected > 0};
  }
  take_in(sink);
  if (sink.grad_in_bucket() && stays_in_bucket()) return open_apart(sink, bucket);
  // Held on this rank, whole, until the next reduction.
  if (sink.grad_in_bucket()) sink.make_whole(bucket.kept, team_.mesh().shard);
  const bool fresh = !sink.grad().defined();
  if (fresh) sink.grad() = at::empty_like(sink.parameter, sink.parameter.options().dtype(bucket.dtype));
  return {sink.grad(), !fresh};
}

GradTarget Collected::open_apart(Sink& sink, const Bucket& bucket) {
  const bool first = !sink.apart.defined();
  if (first) sink.apart = at::empty_like(sink.parameter, sink.parameter.options().dtype(bucket.dtype));
  return {sink.apart, !first};
}

void Collected::wrote_fused(const OpenPass* pass, Sink& sink) {
  if (pass == nullptr) return;
  ledger_.delivered(sink.index);
  if (collects(*pass)) {
    if (!goes_apart(buckets_.of(sink))) ++sink.collected;
    sink.contributed = true;
    ledger_.settled(sink.index);
  } else {
    ++sink.unsettled;
  }
}

void Collected::take_in(Sink& sink) {
  if (sink.piece_elsewhere()) sink.take_in_piece();
}

void Collected::check_step(int64_t /*passes*/, const std::deque<Sink>& sinks) const {
  for (const Sink& sink : sinks) {
    if (sink.apart.defined()) check_apart(sink);
    if (sink.grad_elsewhere()) sink.grad_is_piece() ? sink.check_piece() : sink.check_whole();
  }
}

// It belongs to the piece that was there: where that was cleared or replaced by a whole gradient, it goes with it.
at::Tensor Collected::take_apart(Sink& sink) {
  at::Tensor apart = std::exchange(sink.apart, {});
  if (!apart.defined() || !(sink.grad_in_bucket() || sink.piece_elsewhere())) return {};
  check_apart(sink);
  return apart;
}

void Collected::check_apart(const Sink& sink) const {
  const bool elsewhere = sink.piece_elsewhere();
  if (!elsewhere && !(sink.grad_in_bucket() && sink.changed_in_place())) return;
  throw Error(team_.rank(), "the gradient of parameter '" + sink.name +
                                "' was changed in place while a weight gradient that was put off waits to be added to "
                                "it; run a backward, or step(), between the two");
}

void Collected::open_incoming(Bucket& bucket) {
  if (bucket.incoming.sum.defined()) return;
  bucket.incoming.memory = memory_for(bucket);
  bucket.incoming.sum = bucket.incoming.memory.narrow(0, 0, bucket.numel);
}

void Collected::complete_incoming(Bucket& bucket) {
  at::NoGradGuard no_grad;
  open_incoming(bucket);
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    Sink& sink = *bucket.sinks[i];
    settled_all(sink);
    try {
      if (const at::Tensor apart = take_apart(sink); apart.defined()) {
        sink.collect(apart, place_of(bucket, sink), sink.unscaled ? 1.0 : scale());
      }
    } catch (...) {
      note_failure();
    }
    if (sink.unscaled || (sink.grad().defined() && !sink.grad_in_bucket())) {
      const at::Tensor place = place_of(bucket, sink);
      try {
        sink.hand_over(place, sink.unscaled ? 1.0 : scale());
        if (sink.unscaled && scale() != 1.0) place.mul_(scale());
        sink.unscaled = false;
      } catch (...) {
        note_failure();
      }
    }
    int64_t end = sink.slot.offset;
    if (sink.collected > 0) end += sink.parameter.numel();
    if (end < bucket.after(i)) bucket.incoming.sum.narrow(0, end, bucket.after(i) - end).zero_();
    sink.collected = 0;
  }
}

void Collected::open_target(Bucket& bucket) {
  if (!bucket.has_gradient()) return;
  // What no gradient stands for is old.
  for (Sink* sink : bucket.sinks) {
    if (!sink->grad().defined()) sink->view.zero_();
  }
  bucket.incoming.arriving = at::empty_like(bucket.gradient);
}

void Collected::close_target(Bucket& bucket) {
  Incoming& incoming = bucket.incoming;
  if (incoming.arriving.defined()) bucket.gradient.add_(incoming.arriving);
  // They were made under the lanes of the backward and die under this one, which has waited for all of them.
  keep_for_current(incoming.arriving);
  keep_for_current(incoming.sum);
  incoming.arriving.reset();
  incoming.sum.reset();
  // What came meanwhile is added to this, which the engine alone has changed.
  for (Sink* sink : bucket.sinks) {
    if (sink->apart.defined()) sink->remember();
  }
}

}  // namespace plumb

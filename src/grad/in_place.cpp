#include "grad/in_place.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace plumb {
namespace {

c10d::GradBucket as_torchs(const Bucket& bucket, size_t buckets) {
  std::vector<size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  for (const Sink* sink : bucket.sinks) {
    offsets.push_back(static_cast<size_t>(sink->slot.offset));
    lengths.push_back(static_cast<size_t>(sink->parameter.numel()));
    sizes.push_back(sink->parameter.sizes());
    parameters.push_back(sink->parameter);
  }
  return c10d::GradBucket(static_cast<size_t>(bucket.index), buckets, bucket.gradient, std::move(offsets),
                          std::move(lengths), std::move(sizes), std::move(parameters), std::nullopt);
}

}  // namespace

InPlace::InPlace(Team& team, Buckets& buckets, Ledger& ledger)
    : Summing(team, buckets, ledger), divisor_(team.size()) {}

InPlace::~InPlace() = default;

void InPlace::use_hook(std::unique_ptr<c10d::CommHookInterface> hook) { hook_ = std::move(hook); }

bool InPlace::place(Sink& sink, const at::Tensor& gradient) {
  buckets_.make_gradient(buckets_.of(sink), Buckets::Blank::padding);
  if (sink.view_is_wider() || gradient.scalar_type() != sink.view.scalar_type() || gradient.layout() != at::kStrided)
    return false;
  sink.view.copy_(gradient);
  sink.grad() = sink.shown;
  return true;
}

void InPlace::accumulated(Sink& sink) {
  buckets_.make_gradient(buckets_.of(sink), Buckets::Blank::padding);
  settle(sink, 1.0);
}

void InPlace::settle(Sink& sink, double scale) {
  settled_all(sink);
  sink.settle(scale);
}

GradTarget InPlace::open_fused(const OpenPass*, Sink& sink) {
  Bucket& bucket = buckets_.of(sink);
  buckets_.make_gradient(bucket, Buckets::Blank::padding);
  if (sink.view_is_wider()) {
    const bool fresh = !sink.grad().defined();
    if (fresh) sink.grad() = at::empty_like(sink.parameter, sink.parameter.options().dtype(sink.rule.bucket));
    return {sink.grad(), !fresh};
  }
  if (sink.grad_elsewhere() || sink.grad_mirrored()) {
    sink.settle();
    sink.grad() = sink.shown;
  }
  return {sink.view, sink.grad().defined()};
}

void InPlace::wrote_fused(const OpenPass* pass, Sink& sink) {
  if (!sink.view_is_wider()) sink.grad() = sink.shown;
  if (pass != nullptr) {
    ledger_.delivered(sink.index);
    ++sink.unsettled;
  }
}

// The sinks settle here rather than one by one as gradients come: then a gradient is scaled while it is copied, and a
// device copies a whole bucket in one kernel.
void InPlace::begin(Bucket& bucket, const Where&) {
  buckets_.make_gradient(bucket, Buckets::Blank::padding);
  const double mean = hook_ ? 1.0 : 1.0 / divisor_;
  const bool batched = !bucket.device().is_cpu();
  if (batched) copy_together(bucket);
  for (Sink* sink : bucket.sinks) {
    try {
      settle(*sink, batched ? 1.0 : mean);
    } catch (...) {
      note_failure();
      sink->view.zero_();
    }
  }
  ledger_.reduced(bucket.index);
  if (hook_) {
    try {
      c10d::GradBucket as_asked = as_torchs(bucket, buckets_.size());
      answers_[bucket.index] = hook_->runHook(as_asked);
    } catch (...) {
      note_failure();
    }
  } else if (team_.size() > 1) {
    if (batched) bucket.gradient.mul_(mean);
    bucket.reduction = std::make_shared<Pending>(team_.data().all_reduce(bucket.gradient));
  }
}

// The hook's answer is the bucket's gradient, wherever it lies and whatever its dtype.
void InPlace::arrived(Bucket& bucket, const Where&) {
  auto answer = answers_.extract(bucket.index);
  if (answer.empty()) return;
  try {
    answer.mapped()->waitAndThrow();
    const at::Tensor mean = hook_->parseHookResult(answer.mapped()->value());
    if (mean.numel() != bucket.gradient.numel()) {
      throw Error(team_.rank(), "the communication hook made " + std::to_string(mean.numel()) +
                                    " numbers of a bucket of " + std::to_string(bucket.gradient.numel()) +
                                    "; it returns a tensor like bucket.buffer()");
    }
    if (mean.data_ptr() != bucket.gradient.data_ptr()) bucket.gradient.copy_(mean.reshape(bucket.gradient.sizes()));
  } catch (...) {
    note_failure();
  }
}

// Copies every plain gradient of the bucket to its place with one call, and makes the places their .grad.
void InPlace::copy_together(Bucket& bucket) {
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
      sink->grad() = sink->shown;
      ++next;
    }
  }
}

}  // namespace plumb

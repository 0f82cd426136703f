#include "grad/in_place.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <utility>

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

void InPlace::check_step(int64_t /*passes*/, const std::deque<Sink>& sinks) const {
  for (const Sink& sink : sinks) {
    if (sink.grad_elsewhere()) sink.check_whole();
  }
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
    settle(sink, 1.0);
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

// A device that reduces with nobody has nothing to begin early. It copies in as few calls as the memory allows, which holds
// every gradient twice until then.
int64_t InPlace::together(c10::Device device, int64_t /*bucket_bytes*/) const {
  constexpr int64_t bytes = 64 << 20;
  return team_.size() == 1 && !device.is_cpu() ? bytes : 0;
}

void InPlace::begin(Bucket& bucket, const Where& where) {
  pass_ = where.pass;
  buckets_.make_gradient(bucket, Buckets::Blank::padding);
  if (bucket.alone) return reduce({&bucket});
  outgoing_.push_back(&bucket);
}

// On the stream that begin() left as the last one to use each of them.
void InPlace::send() {
  if (!outgoing_.empty()) reduce(std::exchange(outgoing_, {}));
}

// The sinks settle here rather than one by one as gradients come: then a gradient is scaled while it is copied, and a
// device copies whole buckets in one kernel.
void InPlace::reduce(const std::vector<Bucket*>& buckets) {
  copy_together(buckets);
  for (Bucket* one : buckets) {
    Bucket& bucket = *one;
    const double mean = hook_ ? 1.0 : 1.0 / divisor_;
    const bool batched = !bucket.device().is_cpu();
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
      look_at(bucket.gradient, pass_);
      bucket.reduction = std::make_shared<Pending>(team_.data().all_reduce(bucket.gradient));
    }
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

// Copies every plain gradient of the buckets on devices to its place, with one call for those of a kind, and makes the places
// their .grad. One of other strides would cost all of them the fast way.
void InPlace::copy_together(const std::vector<Bucket*>& buckets) {
  struct Kind {
    c10::Device device;
    at::ScalarType dtype;
    std::vector<at::Tensor> places, gradients;
    std::vector<Sink*> sinks;
  };
  std::vector<Kind> kinds;
  for (const Bucket* bucket : buckets) {
    if (bucket->device().is_cpu()) continue;
    for (Sink* sink : bucket->sinks) {
      if (!sink->grad_elsewhere() || sink->must_settle_now() || sink->grad().requires_grad()) continue;
      const at::Tensor& gradient = sink->grad();
      // settle() copies one of other strides, and says what is wrong with one of another shape or device.
      if (gradient.sizes() != sink->view.sizes() || gradient.strides() != sink->view.strides()) continue;
      if (gradient.device() != sink->view.device()) continue;
      auto kind = std::ranges::find_if(kinds, [&](const Kind& known) {
        return known.device == gradient.device() && known.dtype == gradient.scalar_type();
      });
      if (kind == kinds.end()) {
        kind = kinds.insert(kind, {gradient.device(), gradient.scalar_type(), {}, {}, {}});
      }
      kind->places.push_back(sink->view);
      kind->gradients.push_back(gradient);
      kind->sinks.push_back(sink);
    }
  }
  for (const Kind& kind : kinds) {
    if (kind.sinks.size() < 2) continue;
    at::_foreach_copy_(kind.places, kind.gradients);
    for (const at::Tensor& gradient : kind.gradients) keep_for_current(gradient);
    for (Sink* sink : kind.sinks) sink->grad() = sink->shown;
  }
}

}  // namespace plumb

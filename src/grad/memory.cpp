// The memory of the reduced gradients: made when a gradient first needs it, let go with the gradients.
#include <ATen/ATen.h>

#include <algorithm>

#include "grad/reducer.h"

namespace plumb {

void Reducer::make_gradient(Bucket& bucket, Blank blank) {
  if (bucket.gradient.defined()) return;
  at::NoGradGuard no_grad;
  const c10::Device device = bucket.device();
  bucket.gradient = data_.allocate(bucket.kept.size(), at::TensorOptions().dtype(bucket.dtype).device(device));
  if (blank == Blank::yes) bucket.gradient.zero_();
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    Sink& sink = *bucket.sinks[i];
    const bool in_bucket = sink.grad_in_bucket();
    if (shards_gradient_) {
      const Range mine = overlap(sink.slot, sink.parameter.numel(), bucket.kept);
      const int64_t begin = std::clamp<int64_t>(mine.begin - bucket.kept.begin, 0, bucket.kept.size());
      std::vector<int64_t> shape(sink.parameter.dim() + 1, 1);
      shape.back() = mine.size();
      at::AutoDispatchBelowADInplaceOrView plain;
      sink.view = bucket.gradient.narrow(0, begin, mine.size()).view(shape);
    } else {
      sink.view = view_in(bucket.gradient, sink.slot.offset, sink.parameter);
      const int64_t end = sink.slot.offset + sink.parameter.numel();
      if (blank == Blank::padding && end < bucket.after(i))
        bucket.gradient.narrow(0, end, bucket.after(i) - end).zero_();
    }
    if (in_bucket) sink.grad() = sink.view;
  }
}

// There are no gradients: forwards need the memory more. Small buckets keep theirs. So do all where it is the backend's,
// whose pages others see, and on devices, where a captured graph may know the place.
void Reducer::let_go_of_gradients() {
  const std::lock_guard lock(mutex_);
  if (open_ || deterministic_ || stopped_ || data_.owns_memory(at::kCPU)) return;
  for (Bucket& bucket : buckets_) {
    if (!bucket.gradient.defined() || static_cast<int64_t>(bucket.gradient.nbytes()) <= small) continue;
    if (!bucket.device().is_cpu() || bucket.under_way || bucket.has_gradient()) continue;
    bucket.gradient.reset();
    for (Sink* sink : bucket.sinks) sink->view.reset();
  }
}

// A gradient that somebody keeps although .grad was cleared or replaced is his: the bucket gets other memory.
void Reducer::renew_kept() {
  const auto kept = [](const Bucket& bucket) {
    size_t known = 1;  // holders of the memory: the bucket and the views
    bool cleared = false;
    for (const Sink* sink : bucket.sinks) {
      if (!sink->view.defined()) continue;
      ++known;
      if (sink->grad_in_bucket()) continue;
      if (sink->view.use_count() > 1) return true;
      cleared = true;
    }
    return cleared && bucket.gradient.storage().use_count() > known;
  };
  for (Bucket& bucket : buckets_) {
    if (!bucket.gradient.defined() || !kept(bucket)) continue;
    data_.let_go();  // of a reduction that has ended here, and has not been heard of since
    if (!kept(bucket)) continue;
    const Alone alone(bucket.lanes, bucket.device());
    renew(bucket);
  }
}

// The same gradient in other memory, of the bucket's dtype.
void Reducer::renew(Bucket& bucket) {
  const at::Tensor old = bucket.gradient;
  if (!old.defined()) return;
  keep_for_current(old);
  bucket.gradient.reset();
  std::vector<bool> untouched;  // since a deterministic pass ended
  for (const Sink* sink : bucket.sinks)
    untouched.push_back(sink->view.defined() && sink->view._version() == sink->version);
  make_gradient(bucket, Blank::no);
  bucket.gradient.copy_(old);
  for (size_t i = 0; i < untouched.size(); ++i) {
    if (untouched[i]) bucket.sinks[i]->version = bucket.sinks[i]->view._version();
  }
}

}  // namespace plumb

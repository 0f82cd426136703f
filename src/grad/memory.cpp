// The memory of the reduced gradients: made when a gradient first needs it, let go with the gradients, never shared.
#include <ATen/ATen.h>

#include <algorithm>

#include "grad/buckets.h"
#include "layout/digest.h"

namespace plumb {
namespace {

// By more than the `own` references that we know of. From torch 2.13 on, a tensor that Python has seen is held by its
// Python object, whether or not anybody holds that.
template <class Slot>
bool held_elsewhere(const at::Tensor& tensor, size_t own, const Slot& slot) {
  if constexpr (requires { slot.has_unique_reference(); }) {
    if (slot.load_pyobj() != nullptr) return tensor.use_count() > own + 1 || !slot.has_unique_reference();
  }
  return tensor.use_count() > own;
}

}  // namespace

std::shared_ptr<const PieceOf> Buckets::piece_of(const Sink& sink, const Range& kept) const {
  const Range mine = overlap(sink.slot, sink.parameter.numel(), kept);
  const Range range{mine.begin - sink.slot.offset, mine.end - sink.slot.offset};
  return std::make_shared<PieceOf>(holders_, team_.rank(), sink.name, sink.parameter.sizes().vec(), range);
}

void Buckets::make_gradient(Bucket& bucket, Blank blank) {
  if (bucket.gradient.defined()) return;
  at::NoGradGuard no_grad;
  const c10::Device device = bucket.device();
  bucket.gradient = team_.data().allocate(bucket.kept.size(), at::TensorOptions().dtype(bucket.dtype).device(device));
  if (blank == Blank::yes) bucket.gradient.zero_();
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    Sink& sink = *bucket.sinks[i];
    if (team_.shards_gradient()) {
      const at::Tensor view = piece_in(bucket.gradient, bucket.kept, sink);
      sink.rebind(view, mark_piece(view, piece_of(sink, bucket.kept)));
    } else {
      const at::Tensor view = view_in(bucket.gradient, sink.slot.offset, sink);
      sink.rebind(view, view);
      const int64_t end = sink.slot.offset + sink.parameter.numel();
      if (blank == Blank::padding && end < bucket.after(i))
        bucket.gradient.narrow(0, end, bucket.after(i) - end).zero_();
    }
  }
}

// Small buckets keep theirs. So do all where it is the backend's, whose pages others see, and on devices, where a captured
// graph may know the place.
void Buckets::let_go() {
  if (team_.data().owns_memory(at::kCPU)) return;
  for (Bucket& bucket : buckets_) {
    if (!bucket.gradient.defined() || static_cast<int64_t>(bucket.gradient.nbytes()) <= small) continue;
    if (!bucket.device().is_cpu() || bucket.under_way || bucket.has_gradient()) continue;
    bucket.gradient.reset();
    for (Sink* sink : bucket.sinks) {
      sink->view.reset();
      sink->shown.reset();
    }
  }
}

void Buckets::renew_kept() {
  const auto kept = [](const Bucket& bucket) {
    size_t known = 1;  // holders of the memory: the bucket and the views
    bool cleared = false;
    for (const Sink* sink : bucket.sinks) {
      if (!sink->view.defined()) continue;
      const bool marked = !sink->shown.is_same(sink->view);
      known += marked ? 2 : 1;
      if (sink->grad_in_bucket()) continue;
      if (held_elsewhere(sink->shown, marked ? 1 : 2, *sink->shown.unsafeGetTensorImpl()->pyobj_slot())) return true;
      cleared = true;
    }
    return cleared && bucket.gradient.storage().use_count() > known;
  };
  for (Bucket& bucket : buckets_) {
    if (!bucket.gradient.defined() || !kept(bucket)) continue;
    team_.data().let_go();  // of a reduction that has ended here, and has not been heard of since
    if (!kept(bucket)) continue;
    const Alone alone(bucket.lanes, bucket.device());
    renew(bucket);
  }
}

// The same gradient in other memory, of the bucket's dtype.
void Buckets::renew(Bucket& bucket) {
  const at::Tensor old = bucket.gradient;
  if (!old.defined()) return;
  if (bucket.captured) {
    throw Error(team_.rank(),
                "the gradients beside '" + bucket.sinks[0]->name +
                    "' must move, and a graph was captured that writes them where they are: a gradient was kept after "
                    "it was cleared, or a grad_dtype changed; do that before the capture, or build a new engine");
  }
  keep_for_current(old);
  bucket.gradient.reset();
  std::vector<bool> changed;
  for (const Sink* sink : bucket.sinks) changed.push_back(sink->changed_in_place());
  make_gradient(bucket, Blank::no);
  bucket.gradient.copy_(old);
  for (size_t i = 0; i < changed.size(); ++i) {
    if (!changed[i]) bucket.sinks[i]->remember();
  }
}

// Whether the parameter has the shape that its places were made for. One that became another is refused where it is updated.
static bool keeps_shape(const Sink& sink) {
  const at::IntArrayRef sizes = sink.parameter.sizes();
  if (sizes.size() != sink.order.size()) return false;
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * sink.order[d];
  return sink.parameter.numel() == 0 || last + 1 == sink.parameter.numel();
}

void Buckets::take_back(std::deque<Sink>& sinks) {
  const bool sharded = team_.shards_gradient();  // then nobody but us has the view
  for (Sink& sink : sinks) {
    if (!sink.view.defined()) continue;
    const Bucket& bucket = of(sink);
    const int64_t offset = sharded ? sink.view.storage_offset() : bucket.gradient.storage_offset() + sink.slot.offset;
    const at::IntArrayRef sizes = sharded ? sink.view.sizes() : sink.parameter.sizes();
    const at::IntArrayRef strides = sharded ? sink.view.strides() : at::IntArrayRef(sink.order);
    const at::Tensor& shown = sink.shown;
    // A gradient that has gone takes along what autograd knows of it: that it requires one, say.
    const bool known_to_autograd = !sink.grad_in_bucket() && shown.unsafeGetTensorImpl()->autograd_meta() != nullptr;
    if (!known_to_autograd && shown.has_storage() && shown.storage().is_alias_of(bucket.gradient.storage()) &&
        shown.storage_offset() == offset && shown.sizes() == sizes && shown.strides() == strides) {
      continue;
    }
    if (!keeps_shape(sink)) continue;
    at::NoGradGuard no_grad;
    const at::Tensor theirs = sink.grad_in_bucket() ? shown.detach() : at::Tensor();
    if (theirs.defined()) sink.grad().reset();
    const bool changed = known_to_autograd && sink.changed_in_place();
    if (sharded) {
      sink.rebind(sink.view, mark_piece(sink.view, piece_of(sink, bucket.kept)));
    } else {
      const at::Tensor view = view_in(bucket.gradient, sink.slot.offset, sink);
      sink.rebind(view, view);
    }
    if (!changed) sink.remember();
    if (theirs.defined()) sink.grad() = theirs;
  }
}

void Buckets::untangle(std::deque<Sink>& sinks) {
  for (Sink& sink : sinks) {
    if (!sink.grad_elsewhere() || !sink.grad().has_storage()) continue;
    for (Bucket& bucket : buckets_) {
      if (!bucket.gradient.defined() || !sink.grad().storage().is_alias_of(bucket.gradient.storage())) continue;
      at::NoGradGuard no_grad;
      if (team_.shards_gradient() &&
          (sink.grad().sizes() != sink.view.sizes() || sink.grad().const_data_ptr() != sink.view.const_data_ptr())) {
        throw Error(team_.rank(), "the gradient of parameter '" + sink.name +
                                      "' is another parameter's piece; where gradients are sharded, pieces cannot be "
                                      "moved between parameters: assign whole gradients (engine.full_gradient)");
      }
      const Alone there(bucket.lanes, bucket.device());
      const Alone here(of(sink).lanes, bucket.device());
      sink.grad() = sink.grad().clone();
      break;
    }
  }
}

bool Buckets::follow_rules() {
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

}  // namespace plumb

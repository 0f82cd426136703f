#include "grad/sink.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <algorithm>

#include "grad/piece.h"
#include "lane/lane.h"
#include "plumb/error.h"

namespace plumb {
namespace {

void check_fits(const Sink& sink, const at::Tensor& grad) {
  if (grad.sizes() != sink.parameter.sizes()) {
    throw Error(c10::str("the gradient of parameter '", sink.name, "' has shape ", grad.sizes(), "; expected ",
                         sink.parameter.sizes(), ", the parameter's"));
  }
  if (grad.device() != sink.parameter.device()) {
    throw Error(c10::str("the gradient of parameter '", sink.name, "' is on ", grad.device(), "; expected ",
                         sink.parameter.device(), ", the parameter's device"));
  }
  const auto dtype = sink.rule.bucket;
  if (c10::promoteTypes(dtype, grad.scalar_type()) != dtype) {
    throw Error(c10::str(
        "the gradient of parameter '", sink.name, "' is ", grad.scalar_type(), " and would be rounded to ", dtype,
        " in its bucket; set the parameter's grad_dtype or Options::accumulate_dtype to ", grad.scalar_type()));
  }
}

at::Tensor dense_values(const at::Tensor& gradient) {
  const bool sparse = gradient.is_sparse() || gradient.is_sparse_csr();
  return sparse ? gradient.to_dense() : gradient.detach();
}

void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  if (scale == 1.0) {
    to.copy_(from);
  } else if (from.scalar_type() != to.scalar_type()) {
    to.copy_(from).mul_(scale);  // a product would be rounded to the narrower dtype first
  } else {
    // Of the sum's own width: a factor of another dtype would be converted each time.
    const auto width = c10::toRealValueType(to.scalar_type()) == at::kDouble ? at::kDouble : at::kFloat;
    at::mul_out(const_cast<at::Tensor&>(to), from, at::scalar_tensor(scale, width));
  }
}

// A call of ATen costs as much as some thousand elements, and a gradient of a small parameter would need three of them.
constexpr int64_t kSmall = 1 << 12;

// In stretches of a length that is known: others stay scalar at -O2.
void scale_to(float* __restrict target, const float* __restrict source, float factor, int64_t count) {
  constexpr int64_t stretch = 16;
  int64_t i = 0;
  for (; i + stretch <= count; i += stretch) {
    for (int64_t k = 0; k < stretch; ++k) target[i + k] = source[i + k] * factor;
  }
  for (; i < count; ++i) target[i] = source[i] * factor;
}

// Copies `from`, times `scale`, to `offset` of `to`, where the sink's elements lie; false: these are not plain f32 tensors of the
// CPU, or many elements, or in another order, and nothing happened. The same bits as copy_scaled().
bool copy_small(const at::Tensor& to, int64_t offset, const Sink& like, const at::Tensor& from, double scale) {
  const int64_t count = from.numel();
  if (count > kSmall || from.scalar_type() != at::kFloat || to.scalar_type() != at::kFloat || !to.is_cpu())
    return false;
  if (from.key_set() != to.key_set()) return false;  // somebody's own kind of tensor
  if (from.sizes() != like.parameter.sizes() || from.strides() != at::IntArrayRef(like.order)) return false;
  const auto* source = from.const_data_ptr<float>();
  float* target = to.mutable_data_ptr<float>() + offset;
  if (scale == 1.0) {
    std::copy_n(source, count, target);
  } else {
    scale_to(target, source, static_cast<float>(scale), count);
  }
  to.unsafeGetTensorImpl()->bump_version();
  return true;
}

}  // namespace

bool Sink::grad_is_piece() const { return grad().dim() == parameter.dim() + 1 || piece_of(grad()) != nullptr; }

void Sink::open_pass() {
  expected = std::max(1, deliveries);
  deliveries = unsettled = raw = 0;
  unscaled = false;
  forget_contributions();
}

void Sink::forget_contributions() {
  collected = 0;
  contributed = false;
}

// Here and in adopt(), autograd is switched off only where something is computed: most sinks of a pass have nothing of the kind.
void Sink::settle(double scale) {
  unsettled = 0;
  at::Tensor& mine = grad();
  if (!mine.defined()) {
    const at::NoGradGuard no_grad;
    view.zero_();
    return;
  }
  if (mine.is_same(shown)) {
    if (scale == 1.0) return;
    const at::NoGradGuard no_grad;
    view.mul_(scale);
    return;
  }
  if (rule.bucket != at::kFloat || !copy_small(view, 0, *this, mine, scale)) {
    const at::NoGradGuard no_grad;
    check_fits(*this, mine);
    copy_scaled(view, dense_values(mine), scale);
    keep_for_current(mine);
  }
  // A gradient with a graph of its own (create_graph), or of a dtype that must stay as it came, keeps its tensor.
  if (mine.requires_grad() || (!rule.cast && mine.scalar_type() != view.scalar_type()) || view_is_wider()) {
    mirror();
  } else {
    mine = shown;
  }
}

bool Sink::must_settle_now() const {
  const at::Tensor& mine = grad();
  if (!mine.defined()) return false;
  const at::ScalarType dtype = view.defined() ? view.scalar_type() : rule.bucket;
  return (mine.layout() != at::kStrided || mine.scalar_type() != dtype) && grad_elsewhere();
}

void Sink::adopt(bool used) {
  at::Tensor& mine = grad();
  if (mine.defined()) {
    if (!grad_mirrored()) return;
    const at::NoGradGuard no_grad;
    mine.detach().copy_(view);  // the values change, the graph stays; one process would hold these values too
    keep_for_current(mine);
  } else if (used) {
    mine = shown;
    if (view_is_wider() && !grad_is_piece()) {
      const at::NoGradGuard no_grad;
      mine = view.to(rule.bucket);
      mirror();
    }
  }
}

void Sink::bind(const Slot& new_slot, const at::Tensor& new_view) {
  at::NoGradGuard no_grad;
  if (grad_in_bucket() || grad_mirrored()) new_view.copy_(view);
  if (grad_in_bucket()) grad() = new_view;
  slot = new_slot;
  view = shown = new_view;
}

void Sink::rebind(const at::Tensor& new_view, const at::Tensor& new_shown) {
  const bool in_bucket = grad_in_bucket();
  view = new_view;
  shown = new_shown;
  if (!in_bucket) return;
  if (view_is_wider() && !grad_is_piece()) {
    mirror();
  } else {
    grad() = shown;
  }
}

void Sink::collect(const at::Tensor& gradient, const at::Tensor& place, double scale) {
  at::NoGradGuard no_grad;
  check_fits(*this, gradient);
  if (collected++ == 0) {
    copy_scaled(place, dense_values(gradient), scale);
  } else {
    place.add_(dense_values(gradient), scale);
  }
  keep_for_current(gradient);
  contributed = true;
}

bool Sink::collect_small(const at::Tensor& gradient, const at::Tensor& incoming, double scale) {
  if (collected > 0 || rule.bucket != at::kFloat) return false;
  if (!copy_small(incoming, slot.offset, *this, gradient, scale)) return false;
  ++collected;
  contributed = true;
  return true;
}

void Sink::collect_apart(const at::Tensor& gradient, at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  check_fits(*this, gradient);
  if (apart.defined()) {
    apart.add_(dense_values(gradient));
  } else {
    apart = at::empty_like(parameter, parameter.options().dtype(dtype));
    apart.copy_(dense_values(gradient));
  }
  keep_for_current(gradient);
  contributed = true;
}

void Sink::hand_over(const at::Tensor& place, double scale) {
  at::NoGradGuard no_grad;
  at::Tensor& mine = grad();
  if (!mine.defined() || grad_in_bucket()) return;
  if (!grad_is_piece()) {
    collect(mine, place, scale);
    mine.reset();
  } else {
    take_in_piece();
  }
}

void Sink::check_whole() const { check_fits(*this, grad()); }

void Sink::check_piece() const {
  const at::Tensor& mine = grad();
  if (!view.defined() || mine.sizes() != view.sizes()) {
    throw Error(c10::str("the gradient of parameter '", name, "' has shape ", mine.sizes(), "; expected ",
                         parameter.sizes(), ", the parameter's",
                         view.defined() ? c10::str(", or ", view.sizes(), ", this rank's piece of it") : ""));
  }
  const auto theirs = piece_of(mine), own = piece_of(shown);
  if (theirs && own && !same_piece(*theirs, *own)) {
    throw Error(theirs->rank,
                "the gradient of parameter '" + name + "' is another parameter's piece, " + describe(*theirs) +
                    "; where gradients are sharded, pieces cannot be moved between parameters: assign whole "
                    "gradients");
  }
}

void Sink::take_in_piece() {
  at::NoGradGuard no_grad;
  check_piece();
  at::Tensor& mine = grad();
  view.copy_(unmarked(mine));
  keep_for_current(mine);
  mine = shown;
}

void Sink::make_whole(const Range& piece, double copies) {
  at::NoGradGuard no_grad;
  const at::Tensor flat = at::zeros({parameter.numel()}, view.options());
  const Range mine = overlap(slot, parameter.numel(), piece);
  flat.narrow(0, mine.begin - slot.offset, mine.size()).copy_(view.reshape(-1)).mul_(copies);
  grad() = view_in(flat, 0, *this);
}

Range overlap(const Slot& slot, int64_t numel, const Range& part) {
  const int64_t begin = std::max(slot.offset, part.begin);
  const int64_t end = std::min(slot.offset + numel, part.end);
  return begin < end ? Range{begin, end} : Range{slot.offset, slot.offset};
}

at::Tensor piece_in(const at::Tensor& flat, const Range& kept, const Sink& sink) {
  at::NoGradGuard no_grad;
  const Range mine = overlap(sink.slot, sink.parameter.numel(), kept);
  const int64_t begin = std::clamp<int64_t>(mine.begin - kept.begin, 0, kept.size());
  std::vector<int64_t> shape(sink.parameter.dim() + 1, 1);
  shape.back() = mine.size();
  at::AutoDispatchBelowADInplaceOrView plain;
  return flat.narrow(0, begin, mine.size()).view(shape);
}

std::vector<int64_t> order_of(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

namespace {

at::Tensor seen_in(const at::Tensor& flat, int64_t offset, at::IntArrayRef shape, at::IntArrayRef strides) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView plain;  // autograd knows it as a tensor of its own, as any gradient
  return flat.as_strided(shape, strides, flat.storage_offset() + offset);
}

}  // namespace

at::Tensor view_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  return seen_in(flat, offset, parameter.sizes(), order_of(parameter));
}

at::Tensor view_in(const at::Tensor& flat, int64_t offset, const Sink& sink) {
  return seen_in(flat, offset, sink.parameter.sizes(), sink.order);
}

}  // namespace plumb

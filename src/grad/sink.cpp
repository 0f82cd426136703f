#include "grad/sink.h"

#include <ATen/ATen.h>

#include "plumb/error.h"

namespace plumb {
namespace {

void check_fits(const Sink& sink, const at::Tensor& grad) {
  if (grad.sizes() != sink.parameter.sizes()) {
    throw Error(c10::str("the gradient of parameter '", sink.name, "' has shape ", grad.sizes(), "; expected ",
                         sink.parameter.sizes(), ", the parameter's"));
  }
  if (grad.device() != sink.view.device()) {
    throw Error(c10::str("the gradient of parameter '", sink.name, "' is on ", grad.device(), "; expected ",
                         sink.view.device(), ", the parameter's device"));
  }
  const auto dtype = sink.view.scalar_type();
  if (c10::promoteTypes(dtype, grad.scalar_type()) != dtype) {
    throw Error(c10::str(
        "the gradient of parameter '", sink.name, "' is ", grad.scalar_type(), " and would be rounded to ", dtype,
        " in its bucket; set the parameter's grad_dtype or Options::accumulate_dtype to ", grad.scalar_type()));
  }
}

}  // namespace

void Sink::settle(double scale) {
  at::NoGradGuard no_grad;
  unsettled = 0;
  at::Tensor& mine = grad();
  if (!mine.defined()) {
    view.zero_();
    return;
  }
  if (mine.is_same(view)) {
    if (scale != 1.0) view.mul_(scale);
    return;
  }
  check_fits(*this, mine);
  const bool sparse = mine.is_sparse() || mine.is_sparse_csr();
  const at::Tensor dense = sparse ? mine.to_dense() : mine.detach();
  if (scale == 1.0) {
    view.copy_(dense);
  } else {
    at::mul_out(view, dense, at::scalar_tensor(scale));
  }
  // A gradient with a graph of its own (create_graph), or of a dtype that must stay as it came, keeps its tensor.
  if (mine.requires_grad() || (!rule.cast && mine.scalar_type() != view.scalar_type())) {
    mirror_ = decltype(mirror_)(mine.getIntrusivePtr());
  } else {
    mine = view;
  }
}

bool Sink::must_settle_now() const {
  return grad_elsewhere() && (grad().layout() != at::kStrided || grad().scalar_type() != view.scalar_type());
}

void Sink::adopt(bool used) {
  at::NoGradGuard no_grad;
  at::Tensor& mine = grad();
  if (grad_mirrored()) {
    mine.detach().copy_(view);  // the values change, the graph stays; one process would hold these values too
  } else if (!mine.defined() && used) {
    mine = view;
  }
}

void Sink::bind(const Slot& new_slot, const at::Tensor& new_view) {
  at::NoGradGuard no_grad;
  if (grad_in_bucket()) {
    new_view.copy_(view);
    grad() = new_view;
  }
  slot = new_slot;
  view = new_view;
}

at::Tensor view_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset() + offset);
  }
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

}  // namespace plumb

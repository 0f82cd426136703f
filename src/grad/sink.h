// Sink: the one place where one parameter's gradient goes.
//
// The parameter's own .grad is the truth about what has accumulated on this rank: undefined means nothing (whatever the
// bucket holds is old), the sink's view means "in the bucket already", and any other tensor, the user's or autograd's,
// replaces what the bucket holds. So zero_grad, assigning, scaling and clearing gradients need no call to us.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "grad/node.h"
#include "grad/rule.h"
#include "layout/layout.h"

namespace plumb {

struct Sink {
  int index = -1;
  std::string name;
  at::Tensor parameter;
  GradRule rule;
  NodePtr accumulator;  // held, or autograd would drop our hooks with it

  Slot slot;
  at::Tensor view;  // this parameter's part of its bucket, in the parameter's shape

  int deliveries = 0;  // gradients autograd handed over in this pass
  int unsettled = 0;   // of those, not yet in the bucket

  at::Tensor& grad() const { return parameter.mutable_grad(); }
  bool grad_in_bucket() const { return grad().defined() && grad().is_same(view); }
  // .grad keeps a tensor of its own beside the view, which gets the reduced values back.
  bool grad_mirrored() const {
    return grad().defined() && mirror_._unsafe_get_target() == grad().unsafeGetTensorImpl();
  }
  // The bucket has not seen this .grad yet.
  bool grad_elsewhere() const { return grad().defined() && !grad_in_bucket() && !grad_mirrored(); }

  // Brings the bucket in line with .grad. Afterwards the view holds this rank's gradient times `scale`, or zeros where
  // there is none; .grad is the view wherever that loses nothing. One pass over the memory.
  void settle(double scale = 1.0);
  // Whether .grad must be settled before the next gradient is added to it: sums are kept in the bucket's dtype.
  bool must_settle_now() const;
  // Brings .grad in line with the bucket after a reduction. `used`: some rank had a gradient.
  void adopt(bool used);
  // Moves the gradient to its place in another bucket; contract 1: any old gradient survives.
  void bind(const Slot& new_slot, const at::Tensor& new_view);

 private:
  // Weak: whether a gradient stays alive is the user's business.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> mirror_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

// The part of `flat` at `offset` seen in the shape of `parameter`, with its strides where they are dense.
at::Tensor view_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter);

}  // namespace plumb

// Sink: the one place where one parameter's gradient goes.
//
// The parameter's own .grad is the truth about what has accumulated: undefined means nothing (whatever the bucket holds
// is old), the sink's view means "in the bucket already", and any other tensor, the user's or autograd's, replaces what
// the bucket holds. So zero_grad, assigning, scaling and clearing gradients need no call to us.
//
// Where gradients are sharded, the view is this rank's piece of the reduced gradient, of shape [1, …, 1, k] with one
// dimension more than the parameter (k may be 0), and .grad holds it as a piece (grad/piece.h): it is never taken for a
// whole gradient. A tensor of the parameter's own shape is what this rank contributes to the next reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "grad/node.h"
#include "grad/rule.h"
#include "layout/layout.h"

namespace plumb {

class FusedSink;

struct Sink {
  int index = -1;
  std::string name;
  at::Tensor parameter;
  // The strides that its elements lie by in every bucket: those of the parameter when its sink was made, whatever memory the
  // user gives it later. Of one that is not dense: in the order of its shape.
  std::vector<int64_t> order;
  int unit = -1;  // the unit that gathers the parameter; -1: it is always whole
  GradRule rule;
  NodePtr accumulator;                  // held, or autograd would drop our hooks with it
  std::shared_ptr<FusedSink> entrance;  // for operations that write the gradient themselves
  int put_off = 0;                      // contributions that an operation will make later

  Slot slot;
  at::Tensor view;      // this parameter's part of its bucket
  at::Tensor shown;     // the view as .grad holds it: where gradients are sharded, a piece that knows that it is one
  int64_t version = 0;  // of the view when the engine last left it
  int64_t own_version = 0;  // and of the tensor that .grad keeps beside it, if there is one
  bool agreed = false;      // the ranks had agreed on .grad then
  bool left = false;        // the user had left it so when an operation began to write it between passes
  // What waits beside the piece in .grad for the next reduction: what operations wrote between passes where replicas hold the piece,
  // too; and what came while the bucket's reduction was on its way, and could not be waited for.
  at::Tensor apart;

  // What this pass has brought.
  int deliveries = 0;        // gradients handed over
  int raw = 0;               // of those, past autograd, whose accumulator then has nothing more to bring
  int expected = 1;          // as many as in the last pass
  bool complete = false;     // all of those came, and all that was put off: its bucket waits for it no longer
  int unsettled = 0;         // of those, not yet in the bucket
  int collected = 0;         // of those, in the bucket's `incoming`
  bool unscaled = false;     // those in `incoming` are not scaled yet
  bool contributed = false;  // this rank has put something into `incoming`

  at::Tensor& grad() const { return parameter.mutable_grad(); }
  bool grad_in_bucket() const { return grad().defined() && grad().is_same(shown); }
  bool grad_is_piece() const;
  // .grad keeps a tensor of its own beside the view, which gets the reduced values back.
  bool grad_mirrored() const {
    return grad().defined() && mirror_._unsafe_get_target() == grad().unsafeGetTensorImpl();
  }
  // The bucket has not seen this .grad yet.
  bool grad_elsewhere() const { return grad().defined() && !grad_in_bucket() && !grad_mirrored(); }
  // It lies where the view does: the view itself, or a detached twin, as Module::zero_grad(false) leaves it.
  bool grad_shows_view() const {
    return grad_in_bucket() || (grad().defined() && view.defined() && grad().has_storage() && view.numel() > 0 &&
                                grad().const_data_ptr() == view.const_data_ptr() && grad().sizes() == view.sizes());
  }
  // The user's own piece: computed of the one that is shown, say.
  bool piece_elsewhere() const { return grad_elsewhere() && grad_is_piece(); }
  // A neighbour's rule asks the bucket for a wider dtype than this leaf's gradients have.
  bool view_is_wider() const { return view.defined() && view.scalar_type() != rule.bucket; }

  void open_pass();
  void forget_contributions();
  // The engine leaves the view as it is now; whether the user changed it in place since.
  void remember() {
    version = view.defined() ? view._version() : 0;
    own_version = grad_mirrored() ? grad()._version() : 0;
  }
  bool changed_in_place() const { return grad_shows_view() && view._version() != version; }
  bool changed_beside_view() const { return grad_mirrored() && grad()._version() != own_version; }

  // Brings the bucket in line with .grad. Afterwards the view holds this rank's gradient times `scale`, or zeros where
  // there is none; .grad is the view wherever that loses nothing. One pass over the memory.
  void settle(double scale = 1.0);
  // Whether .grad must be settled before the next gradient is added to it: sums are kept in the bucket's dtype.
  bool must_settle_now() const;
  // Brings .grad in line with the bucket after a reduction. `used`: some rank had a gradient.
  void adopt(bool used);
  // More is about to be added to a .grad beside the view, which the bucket's reduction has not seen.
  void go_on_alone() { mirror_ = decltype(mirror_)(no_tensor()); }
  // Moves the gradient to its place in another bucket; contract 1: any old gradient survives.
  void bind(const Slot& new_slot, const at::Tensor& new_view);
  // The bucket has other memory; what it holds comes along. A gradient keeps its dtype.
  void rebind(const at::Tensor& new_view, const at::Tensor& new_shown);

  // Adds a contribution, times `scale`, to `place`, this parameter's part of `incoming`; the first one overwrites.
  void collect(const at::Tensor& gradient, const at::Tensor& place, double scale);
  // The same for the first one, of few elements, into all of `incoming`; false: it is none of that kind, and nothing happened.
  bool collect_small(const at::Tensor& gradient, const at::Tensor& incoming, double scale);
  // The same beside the piece, whole and in this dtype.
  void collect_apart(const at::Tensor& gradient, at::ScalarType dtype);
  // Throws unless a .grad that is not the view is a whole gradient of this parameter; unless it is this rank's piece of one.
  void check_whole() const;
  void check_piece() const;
  // Hands a .grad that is not the view over: a whole one to `place`, the user's copy of a piece to the view.
  void hand_over(const at::Tensor& place, double scale);
  // The user's own piece in .grad becomes the one that is shown.
  void take_in_piece();
  // Makes a piece a whole tensor again, such that the mean over the ranks gives the piece back: `copies` is how many
  // ranks would contribute, over how many of them hold this piece.
  void make_whole(const Range& piece, double copies);

 private:
  static c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> no_tensor() { return {}; }
  void mirror() { mirror_ = decltype(mirror_)(grad().getIntrusivePtr()); }
  // Weak: whether a gradient stays alive is the user's business.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> mirror_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

// The strides of a tensor's elements where they are dense, in the order of its shape otherwise.
std::vector<int64_t> order_of(const at::Tensor& tensor);

// The part of `flat` at `offset` seen in the shape of `parameter`, with its strides where they are dense.
at::Tensor view_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter);
// The same in the order of the sink's buckets.
at::Tensor view_in(const at::Tensor& flat, int64_t offset, const Sink& sink);

// This rank's piece of the parameter's gradient in `flat`, which holds the elements `kept` of the bucket.
at::Tensor piece_in(const at::Tensor& flat, const Range& kept, const Sink& sink);

// The elements of a parameter at `slot` that lie in `part` of the bucket, counted from the bucket's begin.
Range overlap(const Slot& slot, int64_t numel, const Range& part);

}  // namespace plumb

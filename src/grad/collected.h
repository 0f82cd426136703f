// Collected: gradients that are not summed in place. A contribution is taken away from autograd into the bucket's
// `incoming`, which lives from a pass's first gradient to its reduction; what stays is the reduced sum. A whole tensor in
// .grad is what this rank contributes to the next reduction.
#pragma once

#include "grad/summing.h"

namespace plumb {

class Collected : public Summing {
 public:
  using Summing::Summing;

  at::Tensor accept(const OpenPass& pass, Sink& sink, const at::Tensor& gradient) final;
  void accumulated(Sink& sink) final;
  GradTarget open_fused(const OpenPass* pass, Sink& sink) final;
  void wrote_fused(const OpenPass* pass, Sink& sink) final;
  void check_step(int64_t passes, const std::deque<Sink>& sinks) const override;

 protected:
  // Whether gradients of this pass are collected, or stay in .grad.
  virtual bool collects(const OpenPass& pass) const = 0;
  // A contribution's factor.
  virtual double scale() const = 0;
  virtual at::Tensor memory_for(const Bucket& bucket) = 0;
  // Whether what .grad holds of the bucket is more than this rank can give to the next sum alone: several ranks hold it, or it is no
  // mean yet. Then it stays, and what comes between two passes lies apart.
  virtual bool stays_in_bucket() const = 0;

  // A piece of the user's own, if .grad is one, becomes what the bucket holds: before more is added to it.
  virtual void take_in(Sink& sink);

  at::Tensor place_of(Bucket& bucket, const Sink& sink) const {
    return view_in(bucket.incoming.sum, sink.slot.offset, sink);
  }
  void open_incoming(Bucket& bucket);
  // Everything that belongs into `incoming` and is not there yet: gradients that lie elsewhere, and zeros.
  void complete_incoming(Bucket& bucket);
  // The bucket's gradient, where the reduction of `incoming` may arrive. The first one overwrites all of it; a later one is
  // added to what is there.
  void open_target(Bucket& bucket);
  // The reduction has arrived there.
  void close_target(Bucket& bucket);
  // The place of a whole contribution that waits for the next reduction beside the piece in .grad.
  static GradTarget open_apart(Sink& sink, const Bucket& bucket);
  bool goes_apart(const Bucket& bucket) const { return bucket.under_way && !may_wait(); }
  // Throws if that piece was changed since what waits beside it came.
  void check_apart(const Sink& sink) const;
  // What waits to be added to the piece in .grad; undefined: nothing.
  at::Tensor take_apart(Sink& sink);
};

}  // namespace plumb

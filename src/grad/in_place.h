// In place: gradients that are whole on every rank. Autograd sums into .grad, which is a view of the bucket wherever that
// loses nothing; the bucket is scaled by 1/N and all-reduced.
#pragma once

#include "grad/summing.h"

namespace plumb {

class InPlace final : public Summing {
 public:
  using Summing::Summing;

  OpenPass::Sync sync(Wish wish) const override {
    return wish == Wish::reduce ? OpenPass::Sync::reduced : OpenPass::Sync::held;
  }
  at::Tensor accept(const OpenPass&, Sink&, const at::Tensor& gradient) override { return gradient; }
  void accumulated(Sink& sink) override;
  GradTarget open_fused(const OpenPass* pass, Sink& sink) override;
  void wrote_fused(const OpenPass* pass, Sink& sink) override;
  void begin(Bucket& bucket, const Where& where) override;
  bool holds_in_buckets() const override { return true; }

 private:
  void settle(Sink& sink, double scale);
  static void copy_together(Bucket& bucket);
};

}  // namespace plumb

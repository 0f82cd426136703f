// Scaler: dynamic loss scaling. It knows the scale that losses are multiplied by, and the one that the gradients are in:
// 1 after step() has divided them, so that nothing divides them again, and the losses' own from the next backward on.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "grad/bucket.h"
#include "plumb/engine.h"

namespace plumb {

class Scaler {
 public:
  explicit Scaler(const std::optional<LossScale>& rule);

  bool on() const { return rule_.has_value(); }
  // Of the next loss; 1 without a rule.
  double scale() const { return *scale_; }
  // That the gradients are in now.
  double of_gradients() const { return of_gradients_; }

  // The loss times the scale. Whenever its graph is walked, its gradients come in the scale of that time.
  at::Tensor scaled(const at::Tensor& loss) const;

  // Gradients of losses are about to come: whatever .grad holds from before is brought to their scale.
  void begin_pass(std::deque<Bucket>& buckets);
  // The gradients are as without loss scaling from here on.
  void unscale(std::deque<Bucket>& buckets);
  // There are none: those that are set from here on count as they are.
  void forget() { of_gradients_ = 1.0; }
  // A step has ended. One decision for all ranks: they all know whether it was skipped.
  void settle(bool skipped);

  // For checkpoints.
  int64_t good_steps() const { return good_steps_; }
  int64_t patience() const { return patience_; }
  void restore(double scale, int64_t good_steps, int64_t patience) {
    *scale_ = scale;
    good_steps_ = good_steps;
    patience_ = patience;
  }

 private:
  std::optional<LossScale> rule_;
  std::shared_ptr<double> scale_;  // graphs that the user keeps look at it, too
  double of_gradients_ = 1.0;
  int64_t good_steps_ = 0;  // since the scale last changed, or a step was skipped
  int64_t patience_ = 0;    // skipped steps until the scale falls
};

}  // namespace plumb

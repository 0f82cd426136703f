#include "optim/scaler.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "optim/norm.h"

namespace plumb {

Scaler::Scaler(const std::optional<LossScale>& rule)
    : rule_(rule), scale_(std::make_shared<double>(rule ? rule->initial : 1.0)), good_steps_(rule ? -rule->delay : 0),
      patience_(rule ? rule->hysteresis : 0) {}

at::Tensor Scaler::scaled(const at::Tensor& loss) const {
  if (!on()) return loss;
  const at::Tensor result = loss * scale();
  if (!result.requires_grad()) return result;
  // A step between here and the backward, or between two backwards of one graph, may change the scale.
  result.register_hook([now = std::shared_ptr<const double>(scale_), then = scale()](const at::Tensor& gradient) {
    return *now == then ? gradient : gradient * (*now / then);
  });
  return result;
}

void Scaler::begin_pass(std::deque<Bucket>& buckets) {
  if (of_gradients_ == scale()) return;
  at::NoGradGuard no_grad;
  const double factor = scale() / of_gradients_;
  for (Bucket& bucket : buckets) {
    if (!bucket.has_gradient()) continue;
    const Alone alone(bucket.lanes, bucket.device());
    for (const Sink* sink : bucket.sinks) {
      at::Tensor& gradient = sink->grad();
      if (!gradient.defined()) continue;
      if (sink->grad_in_bucket() || sink->grad_mirrored()) {
        gradient.detach().mul_(factor);
      } else {
        keep_for_current(gradient);
        gradient = gradient * factor;  // not in place: two parameters may have been given one tensor
      }
    }
  }
  of_gradients_ = scale();
}

void Scaler::unscale(std::deque<Bucket>& buckets) {
  if (of_gradients_ == 1.0) return;
  scale_gradients(buckets, at::scalar_tensor(1.0 / of_gradients_, at::kDouble));
  of_gradients_ = 1.0;
}

void Scaler::settle(bool skipped) {
  if (skipped) {
    good_steps_ = -rule_->delay;
    if (--patience_ > 0) return;
    patience_ = 1;  // every further one counts, until the scale has recovered
    *scale_ = std::max(*scale_ * rule_->backoff, std::min(rule_->minimum, *scale_));
    return;
  }
  if (rule_->recovery == LossScale::Recovery::at_a_good_step) patience_ = rule_->hysteresis;
  if (++good_steps_ < rule_->interval) return;
  good_steps_ = 0;
  patience_ = rule_->hysteresis;
  *scale_ *= rule_->growth;
}

}  // namespace plumb

#include "optim/scaler.h"

#include <ATen/ATen.h>

#include "optim/norm.h"

namespace plumb {

Scaler::Scaler(const std::optional<LossScale>& rule)
    : rule_(rule), scale_(std::make_shared<double>(rule ? rule->initial : 1.0)) {}

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
    *scale_ *= rule_->backoff;
    good_steps_ = 0;
  } else if (++good_steps_ == rule_->interval) {
    *scale_ *= rule_->growth;
    good_steps_ = 0;
  }
}

}  // namespace plumb

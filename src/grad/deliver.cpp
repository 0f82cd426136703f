// Entrance 3: gradients that come without autograd, from a compiled or hand-written backward.
#include <ATen/ATen.h>

#include "grad/reducer.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

void Reducer::deliver(const at::Tensor& parameter, const at::Tensor& raw) {
  Lock lock(mutex_);
  check_alive();
  Sink* sink = sink_of(parameter);
  if (sink == nullptr || !parameter.requires_grad()) {
    throw Error(world_.rank(), "a gradient was delivered for a frozen parameter; set requires_grad first");
  }
  if (!raw.defined())
    throw Error(world_.rank(), "an undefined gradient was delivered for parameter '" + sink->name + "'");
  if (raw.sizes() != parameter.sizes()) {
    throw Error(world_.rank(), c10::str("the gradient delivered for parameter '", sink->name, "' has shape ",
                                        raw.sizes(), "; expected ", parameter.sizes(), ", the parameter's"));
  }
  at::NoGradGuard no_grad;
  // Outside of every backward this opens a pass of its own, which end_pass() closes.
  if (!in_pass()) {
    begin_backward();
    delivering_ = true;
  }
  const GradRule rule = grad_rule(parameter, options_.accumulate_dtype);
  const at::Tensor gradient = before_accumulation(*sink, rule.cast ? raw.to(*rule.cast) : raw);
  at::Tensor& mine = sink->grad();
  if (gradient.defined()) {
    if (mine.defined()) {
      mine.add_(gradient);
    } else {
      mine = gradient.is_same(raw) ? gradient.clone() : gradient;  // the caller may use its memory again
    }
  }
  after_accumulation(*sink, gradient);
}

void Reducer::end_pass() {
  {
    Lock lock(mutex_);
    if (!delivering_) {
      throw Error(world_.rank(), "end_pass() without a delivered gradient; inside a backward, the pass ends with it");
    }
    delivering_ = false;
  }
  end_backward(nullptr);
}

}  // namespace plumb

// The entrances beside autograd's: operations that write a gradient into its bucket themselves (2), and compiled or
// hand-written backwards that hand over raw ones (3).
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include "grad/reducer.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

bool Reducer::inside_pass() const { return pass_ || torch::autograd::get_current_graph_task_id() >= 0; }

// ---- 2

GradTarget Reducer::open_fused(Sink& sink) {
  Lock lock(mutex_);
  at::NoGradGuard no_grad;
  if (stopped_)
    throw Error(team_.rank(), "the gradient of parameter '" + sink.name + "' comes after its engine has ended");
  check_alive();
  const bool inside = inside_pass();
  if (inside) {
    join_pass(sink, true);
  } else {
    Bucket& bucket = buckets_.of(sink);
    bucket.lanes.begin_part(bucket.device(), sink.index);
    // What is written now is this rank's own, and no change of the user's: others may have nothing to write.
    sink.agreed = sink.agreed && sink.grad().defined();
    sink.left = !sink.changed_in_place();
  }
  return summing_->open_fused(inside ? &*pass_ : nullptr, sink);
}

void Reducer::wrote_fused(Sink& sink) {
  Lock lock(mutex_);
  Bucket& bucket = buckets_.of(sink);
  bucket.lanes.end_part(bucket.device(), sink.index);
  const bool inside = inside_pass();
  summing_->wrote_fused(inside ? &*pass_ : nullptr, sink);
  if (inside) return;
  // A weight gradient that was put off comes between backwards: the next backward, or step(), reduces it.
  bucket.made_up = true;
  if (sink.left) sink.remember();
  ledger_.open_pass(steps_, passes_);
  ledger_.delivered(sink.index);
  ledger_.settled(sink.index);
  ledger_.close_pass(Ledger::Sync::held);
}

// While the pass is open, it may have been the last that its bucket waited for.
void Reducer::made_up_fused(Sink& sink) {
  Lock lock(mutex_);
  --sink.put_off;
  if (!pass_) return;
  count_down(sink);
  launch_ready();
}

void Reducer::check_nothing_put_off(const std::string& what) const {
  for (const Sink& sink : sinks()) {
    if (sink.put_off == 0) continue;
    throw Error(team_.rank(), what + " while " + std::to_string(sink.put_off) + " weight gradient" +
                                  (sink.put_off == 1 ? "" : "s") + " of parameter '" + sink.name +
                                  "' are put off; call backward_dw() on its module first");
  }
}

// ---- 3

bool Reducer::hand_over(const at::Tensor& parameter, const torch::autograd::Node& accumulator, const at::Tensor& raw) {
  Lock lock(mutex_);
  if (stopped_ || !parameter.requires_grad()) return false;
  const Sink* sink = members_.find(parameter);
  if (sink == nullptr || !members_.alone(*sink, accumulator)) return false;
  deliver(parameter, raw);
  return true;
}

void Reducer::deliver(const at::Tensor& parameter, const at::Tensor& raw) {
  Lock lock(mutex_);
  check_alive();
  const std::string& name = members_.name_of(parameter);
  if (!parameter.requires_grad()) {
    throw Error(team_.rank(), "a gradient was delivered for a frozen parameter; set requires_grad first");
  }
  if (!raw.defined()) throw Error(team_.rank(), "an undefined gradient was delivered for parameter '" + name + "'");
  if (raw.sizes() != parameter.sizes()) {
    throw Error(team_.rank(), c10::str("the gradient delivered for parameter '", name, "' has shape ", raw.sizes(),
                                       "; expected ", parameter.sizes(), ", the parameter's"));
  }
  at::NoGradGuard no_grad;
  // Outside of every backward this opens a pass of its own, which end_pass() closes.
  if (!inside_pass()) {
    begin_backward();
    pass_->end = OpenPass::End::told;
  }
  const GradRule rule = grad_rule(parameter, options_.accumulate_dtype);
  const at::Tensor ruled = rule.cast ? raw.to(*rule.cast) : raw;
  Sink* sink = members_.find(parameter);
  if (sink == nullptr) {  // it has begun to train: the ranks take it in when this pass, or the step, ends
    at::Tensor& first = parameter.mutable_grad();
    first = first.defined() ? first + ruled : ruled.clone();
    return;
  }
  const at::Tensor gradient = before_accumulation(*sink, ruled);
  at::Tensor& mine = sink->grad();
  if (gradient.defined()) {
    if (mine.defined()) {
      mine.add_(gradient);
    } else if (!gradient.is_same(raw)) {
      mine = gradient;
    } else if (!summing_->place(*sink, gradient)) {
      mine = gradient.clone();  // the caller may use its memory again
    }
  }
  accumulated(*sink, gradient);
  ++sink->raw;
}

void Reducer::end_pass() {
  Lock lock(mutex_);
  if (!pass_ || pass_->end != OpenPass::End::told) {
    throw Error(team_.rank(), "end_pass() without a delivered gradient; inside a backward, the pass ends with it");
  }
  pass_->end = OpenPass::End::backward;
  end_backward(nullptr);
}

}  // namespace plumb

#include "nn/delivery.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "plumb/error.h"

namespace plumb::nn {

namespace autograd = torch::autograd;

Weight weight_of_running_node(size_t input) {
  Weight weight;
  const auto node = autograd::get_current_node();
  weight.wanted = node->task_should_compute_output(input);
  if (!weight.wanted) return weight;
  autograd::Node* const next = node->next_edge(input).function.get();
  if (const auto* accumulator = dynamic_cast<autograd::AccumulateGrad*>(next)) {
    weight.leaf = accumulator->variable;
    weight.sink = sink_of(weight.leaf);
  }
  if (const auto* tasks = autograd::get_current_graph_task_exec_info()) {
    const auto found = tasks->find(next);
    weight.demanded = found != tasks->end() && found->second.captures_ != nullptr;
  }
  return weight;
}

Delivery decide(const Weight& weight, When asked) {
  // autograd::grad leaves every buffer alone; so does a backward whose gradients are to be differentiated again.
  if (weight.demanded || at::GradMode::is_enabled()) return {false, When::now, Returned::gradient};
  if (!weight.sink) {
    return {false, asked, asked == When::delayed ? Returned::nothing : Returned::gradient};
  }
  return {true, asked, weight.sink->tell() == Tell::by_stand_in ? Returned::stand_in : Returned::nothing};
}

GradTarget open_checked(FusedSink& sink, const Like& weight) {
  GradTarget target = sink.open();
  const auto dtype = c10::typeMetaToScalarType(weight.options.dtype());
  const std::string name = sink.name();
  const std::string whose = name.empty() ? "the gradient buffer of a weight" : "the gradient buffer of '" + name + "'";
  const at::Tensor& buffer = target.buffer;
  if (!buffer.defined()) {
    throw Error(whose + " is missing; give its sink a buffer, or take the sink away");
  }
  if (buffer.sizes() != at::IntArrayRef(weight.sizes)) {
    throw Error(
        c10::str(whose, " has shape ", buffer.sizes(), "; expected ", at::IntArrayRef(weight.sizes), ", the weight's"));
  }
  if (buffer.device() != weight.options.device()) {
    throw Error(
        c10::str(whose, " is on ", buffer.device(), "; expected ", weight.options.device(), ", where the weight is"));
  }
  if (buffer.scalar_type() != dtype && buffer.scalar_type() != at::kFloat) {
    throw Error(
        c10::str(whose, " is ", buffer.scalar_type(), "; expected ", dtype, ", the weight's dtype, or ", at::kFloat));
  }
  if (buffer.scalar_type() == at::kFloat && dtype == at::kDouble) {
    throw Error(
        c10::str(whose, " is ", at::kFloat, " and would round; expected ", at::kDouble, ", the weight's dtype"));
  }
  if (buffer.layout() != at::kStrided || !buffer.is_contiguous()) {
    throw Error(c10::str(whose, " is not contiguous; expected one dense block in the weight's shape"));
  }
  return target;
}

at::Tensor stand_in(const Like& weight) { return at::zeros({}, weight.options).expand(weight.sizes); }

}  // namespace plumb::nn

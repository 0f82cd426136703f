// Entrance 3 from inside a compiled backward: an output of the autograd node that is running is handed over where it is
// made, so that its reduction begins while the rest of the graph computes. The graph returns nothing for it.
//
// A graph knows no parameters: torch.compile runs one for every module of the same kind. The operator is told of which argument
// of the compiled function a gradient is, and the node's edges say whose. Whatever is not plainly a gradient for a leaf of one of our
// engines is handed back as that output, and goes the way it would have gone.
#include "engine/outputs.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <atomic>
#include <utility>
#include <vector>

#include "engine/impl.h"
#include "engine/owners.h"
#include "grad/mode.h"
#include "grad/node.h"

namespace plumb {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

// With create_graph, autograd lets a compiled backward's outputs refuse to be differentiated again.
at::Tensor once_differentiable(const at::Tensor& gradient) {
  torch::autograd::DelayedError refuses("torch.compile with aot_autograd does not currently support double backward",
                                        1);
  return refuses.apply({gradient.detach().requires_grad_()})[0];
}

// After the node has run: puts what was handed back where the graph returned nothing.
struct HandBack final : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    variable_list all = outputs;
    begin();
    for (auto& [output, gradient] : back)
      all[output] = at::GradMode::is_enabled() ? once_differentiable(gradient) : gradient;
    back.clear();
    return all;
  }
  // What an earlier walk left here, which failed in this node, is nothing of this one.
  void begin() {
    if (std::exchange(walk, torch::autograd::get_current_graph_task_id()) != walk) back.clear();
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  std::vector<std::pair<size_t, at::Tensor>> back;
  int walk = -1;
};

HandBack& hand_back_of(Node& node) {
  for (const auto& hook : node.post_hooks()) {
    if (auto* known = dynamic_cast<HandBack*>(hook.get())) return *known;
  }
  auto hook = std::make_unique<HandBack>();
  HandBack& result = *hook;
  node.add_post_hook(std::move(hook));
  return result;
}

std::atomic<int64_t> handed_over{0}, handed_back{0};

std::atomic<OutputFor>& find_output() {
  static std::atomic<OutputFor> find{[](const Node&, int64_t argument) { return argument; }};
  return find;
}

// As autograd makes an output fit for the node behind it. The caller may use the gradient's memory again.
at::Tensor fit(const Edge& edge, const at::Tensor& gradient) {
  variable_list one{gradient};
  torch::autograd::validate_outputs({edge}, one, [](const std::string& message) {
    return "a compiled backward returned an invalid gradient: " + message;
  });
  return one[0].is_alias_of(gradient) ? one[0].clone() : one[0];
}

// The engine's parameter behind this edge, if what arrives there now is accumulated into its .grad and nothing else.
Engine::Impl* accumulates(const Edge& edge, at::Tensor* parameter) {
  auto* leaf = dynamic_cast<AccumulateGrad*>(edge.function.get());
  if (leaf == nullptr) return nullptr;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && !wanted->empty()) {
    const auto found = wanted->find(leaf);
    if (found == wanted->end() || !found->second.should_execute() || found->second.captures_) return nullptr;
  }
  *parameter = leaf->variable;
  return Owners::all().of_leaf(leaf->variable);
}

void deliver_output(const at::Tensor& gradient, int64_t argument) {
  const TrainingMode training;
  const auto node = torch::autograd::get_current_node();
  const int64_t output = node ? find_output().load()(*node, argument) : -1;
  if (output < 0 || output >= static_cast<int64_t>(node->num_outputs())) {
    throw Error("plumb::deliver.output(gradient, " + std::to_string(argument) +
                ") outside of the backward of a compiled graph; call plumb::deliver(parameter, gradient) there");
  }
  const Edge& edge = node->next_edge(static_cast<size_t>(output));
  if (!edge.is_valid()) return;  // nobody asks for it
  // A graph that is kept may be differentiated again, which only outputs can refuse.
  const bool kept = torch::autograd::get_current_graph_task_keep_graph();
  at::Tensor parameter;
  if (Engine::Impl* owner = kept ? nullptr : accumulates(edge, &parameter)) {
    if (owner->reducer->hand_over(parameter, *edge.function, gradient)) {
      ++handed_over;
      return;
    }
  }
  ++handed_back;
  HandBack& hand_back = hand_back_of(*node);
  hand_back.begin();
  hand_back.back.emplace_back(output, fit(edge, gradient));
}

// While a graph is traced, nothing is delivered.
void deliver_output_meta(const at::Tensor&, int64_t) {}

}  // namespace

void find_outputs_with(OutputFor find) { find_output() = find; }

OutputCounts output_counts() { return {handed_over, handed_back}; }

// A graph of a device that is captured would replay the kernels and not what the host decides.
TORCH_LIBRARY_FRAGMENT(plumb, library) {
  library.def("deliver.output(Tensor gradient, int argument) -> ()", {at::Tag::cudagraph_unsafe});
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, library) { library.impl("deliver.output", &deliver_output); }
TORCH_LIBRARY_IMPL(plumb, Meta, library) { library.impl("deliver.output", &deliver_output_meta); }

}  // namespace plumb

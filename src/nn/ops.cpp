#include "nn/ops.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>

#include "nn/product.h"

namespace plumb::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What an operation's node keeps beside its saved tensors.
struct Kept : torch::CustomClassHolder {
  std::shared_ptr<WgradStore> store;
  std::shared_ptr<const Groups> groups;
  Activation activation = Activation::swiglu;
  size_t ups = 0;  // of the weights, so many come first
};
using KeptPtr = c10::intrusive_ptr<Kept>;

void keep(AutogradContext* context, const KeptPtr& kept) {
  context->saved_data["kept"] = c10::IValue::make_capsule(kept);
}

KeptPtr kept_by(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Kept>(context->saved_data.at("kept").toCapsule());
}

std::vector<Weight> weights_at(size_t first, size_t count) {
  std::vector<Weight> weights;
  for (size_t i = 0; i < count; ++i) weights.push_back(weight_of_running_node(first + i));
  return weights;
}

std::vector<Like> likes_of(const std::vector<at::Tensor>& weights) { return {weights.begin(), weights.end()}; }

bool any_wanted(const std::vector<Weight>& weights) {
  return std::any_of(weights.begin(), weights.end(), [](const Weight& w) { return w.wanted; });
}

// Gradients that can be differentiated again: those of the same function made of plain operations. Aliases stand for
// the inputs, so that no hook on an input sees this inner differentiation.
variable_list differentiable(const std::function<at::Tensor(const variable_list&)>& function,
                             const variable_list& inputs, const at::Tensor& dy) {
  const auto node = torch::autograd::get_current_node();
  variable_list aliases, wanted;
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i) {
    aliases.push_back(inputs[i].view_as(inputs[i]));
    if (aliases[i].requires_grad() && node->task_should_compute_output(i)) {
      wanted.push_back(aliases[i]);
      places.push_back(i);
    }
  }
  variable_list result(inputs.size());
  const auto gradients = torch::autograd::grad({function(aliases)}, wanted, {dy}, /*retain_graph=*/true,
                                               /*create_graph=*/true, /*allow_unused=*/true);
  for (size_t i = 0; i < places.size(); ++i) result[places[i]] = gradients[i];
  return result;
}

// Autograd expects an entry, undefined, for each argument of the forward that is no tensor.
variable_list with_extra(variable_list gradients, size_t extra) {
  gradients.resize(gradients.size() + extra);
  return gradients;
}

struct LinearNode : torch::autograd::Function<LinearNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const KeptPtr& kept) {
    keep(context, kept);
    context->save_for_backward({x, weight});
    return at::linear(x, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    const KeptPtr kept = kept_by(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const bool biased = torch::autograd::get_current_node()->num_outputs() == 3;
    at::Tensor dbias;
    if (biased && context->needs_input_grad(2)) dbias = outputs[0].reshape({-1, weight.size(0)}).sum(0);
    if (at::GradMode::is_enabled()) {
      auto gradients =
          differentiable([](const variable_list& in) { return at::linear(in[0], in[1]); }, {x, weight}, outputs[0]);
      return {gradients[0], gradients[1], dbias, {}};
    }
    const at::Tensor dy = outputs[0].reshape({-1, weight.size(0)}).contiguous();
    at::Tensor dx;
    if (context->needs_input_grad(0)) dx = dy.mm(weight).view(x.sizes());
    const auto weights = weights_at(1, 1);
    at::Tensor dweight;
    if (weights[0].wanted) {
      dweight =
          deliver(dy, x.reshape({-1, weight.size(1)}).contiguous(), nullptr, weights, {Like(weight)}, kept->store)[0];
    }
    return {dx, dweight, dbias, {}};
  }
};

struct GroupedLinearNode : torch::autograd::Function<GroupedLinearNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const KeptPtr& kept) {
    keep(context, kept);
    variable_list saved = {x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(saved);
    return grouped_product(x.contiguous(), weights.vec(), *kept->groups, Side::forward);
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    const KeptPtr kept = kept_by(context);
    const variable_list saved = context->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      const auto function = [&](const variable_list& in) {
        return plain_grouped_product(in[0], {in.begin() + 1, in.end()}, *kept->groups);
      };
      return with_extra(differentiable(function, saved, outputs[0]), 1);
    }
    const std::vector<at::Tensor> values(saved.begin() + 1, saved.end());
    const at::Tensor dy = outputs[0].contiguous();
    variable_list gradients(saved.size());
    if (context->needs_input_grad(0)) gradients[0] = grouped_product(dy, values, *kept->groups, Side::backward);
    const auto weights = weights_at(1, values.size());
    if (any_wanted(weights)) {
      auto made = deliver(dy, saved[0].contiguous(), kept->groups, weights, likes_of(values), kept->store);
      std::move(made.begin(), made.end(), gradients.begin() + 1);
    }
    return with_extra(std::move(gradients), 1);
  }
};

at::Tensor activate(const at::Tensor& h, Activation activation) {
  if (activation == Activation::gelu) return at::gelu(h);
  const auto halves = h.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

at::Tensor activation_gradient(const at::Tensor& da, const at::Tensor& h, Activation activation) {
  if (activation == Activation::gelu) return at::gelu_backward(da, h);
  const auto halves = h.chunk(2, -1);
  at::Tensor dh = at::empty_like(h);
  auto parts = dh.chunk(2, -1);
  at::silu_backward_out(parts[0], da * halves[1], halves[0]);
  at::mul_out(parts[1], da, at::silu(halves[0]));
  return dh;
}

struct GroupedMLPNode : torch::autograd::Function<GroupedMLPNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const KeptPtr& kept) {
    keep(context, kept);
    const std::vector<at::Tensor> up(weights.begin(), weights.begin() + kept->ups);
    const std::vector<at::Tensor> down(weights.begin() + kept->ups, weights.end());
    const at::Tensor h = grouped_product(x.contiguous(), up, *kept->groups, Side::forward);
    variable_list saved = {x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    saved.push_back(h);
    context->save_for_backward(saved);
    return grouped_product(activate(h, kept->activation), down, *kept->groups, Side::forward);
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    const KeptPtr kept = kept_by(context);
    variable_list saved = context->get_saved_variables();
    const at::Tensor h = saved.back();
    saved.pop_back();
    const auto split = static_cast<std::ptrdiff_t>(1 + kept->ups);
    if (at::GradMode::is_enabled()) {
      const auto function = [&](const variable_list& in) {
        const at::Tensor inner = plain_grouped_product(in[0], {in.begin() + 1, in.begin() + split}, *kept->groups);
        return plain_grouped_product(activate(inner, kept->activation), {in.begin() + split, in.end()}, *kept->groups);
      };
      return with_extra(differentiable(function, saved, outputs[0]), 1);
    }
    const std::vector<at::Tensor> up(saved.begin() + 1, saved.begin() + split),
        down(saved.begin() + split, saved.end());
    const auto up_weights = weights_at(1, up.size()), down_weights = weights_at(1 + up.size(), down.size());
    const bool input = context->needs_input_grad(0);
    const at::Tensor dy = outputs[0].contiguous();
    variable_list gradients(saved.size());
    if (input || any_wanted(up_weights)) {
      const at::Tensor da = grouped_product(dy, down, *kept->groups, Side::backward);
      const at::Tensor dh = activation_gradient(da, h, kept->activation);
      if (input) gradients[0] = grouped_product(dh, up, *kept->groups, Side::backward);
      if (any_wanted(up_weights)) {
        auto made = deliver(dh, saved[0].contiguous(), kept->groups, up_weights, likes_of(up), kept->store);
        std::move(made.begin(), made.end(), gradients.begin() + 1);
      }
    }
    if (any_wanted(down_weights)) {
      auto made = deliver(dy, activate(h, kept->activation), kept->groups, down_weights, likes_of(down), kept->store);
      std::move(made.begin(), made.end(), gradients.begin() + split);
    }
    return with_extra(std::move(gradients), 1);
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  std::shared_ptr<WgradStore> store) {
  auto kept = c10::make_intrusive<Kept>();
  kept->store = std::move(store);
  return LinearNode::apply(x, weight, bias, kept);
}

at::Tensor grouped_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                          std::shared_ptr<const Groups> groups, std::shared_ptr<WgradStore> store) {
  auto kept = c10::make_intrusive<Kept>();
  kept->store = std::move(store);
  kept->groups = std::move(groups);
  return GroupedLinearNode::apply(x, at::TensorList(weights), kept);
}

at::Tensor grouped_mlp(const at::Tensor& x, const std::vector<at::Tensor>& up, const std::vector<at::Tensor>& down,
                       Activation activation, std::shared_ptr<const Groups> groups, std::shared_ptr<WgradStore> store) {
  auto kept = c10::make_intrusive<Kept>();
  kept->store = std::move(store);
  kept->groups = std::move(groups);
  kept->activation = activation;
  kept->ups = up.size();
  std::vector<at::Tensor> weights = up;
  weights.insert(weights.end(), down.begin(), down.end());
  return GroupedMLPNode::apply(x, at::TensorList(weights), kept);
}

}  // namespace plumb::nn

#include "nn/ops.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>

#include "nn/product.h"
#include "plumb/error.h"

namespace plumb::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What an operation's node keeps beside its saved tensors.
struct Kept : torch::CustomClassHolder {
  std::shared_ptr<WgradStore> store;
  std::shared_ptr<const Groups> groups;
  Activation activation = Activation::swiglu;
  size_t layers = 1, weights = 1, biases = 0;  // of each layer
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

// Grouped operations take one list: x, the weights of all layers, their biases, and probabilities if there are some.
class Inputs {
 public:
  Inputs(variable_list all, const Kept& kept) : all_(std::move(all)), kept_(kept) {}

  const at::Tensor& x() const { return all_[0]; }
  std::vector<at::Tensor> weights(size_t layer) const { return some(first_weight(layer), kept_.weights); }
  std::vector<at::Tensor> biases(size_t layer) const { return some(first_bias(layer), kept_.biases); }
  at::Tensor probabilities() const { return all_.size() > at_probabilities() ? all_.back() : at::Tensor(); }

  size_t first_weight(size_t layer) const { return 1 + layer * kept_.weights; }
  size_t first_bias(size_t layer) const { return first_weight(kept_.layers) + layer * kept_.biases; }
  size_t at_probabilities() const { return first_bias(kept_.layers); }

 private:
  std::vector<at::Tensor> some(size_t first, size_t count) const {
    return {all_.begin() + static_cast<std::ptrdiff_t>(first),
            all_.begin() + static_cast<std::ptrdiff_t>(first + count)};
  }

  variable_list all_;
  const Kept& kept_;
};

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
  if (wanted.empty()) return result;  // what is wanted is computed elsewhere: a bias
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

// The gradients of one layer's weights and biases, from what goes into its product and what comes back.
void layer_gradients(variable_list& gradients, AutogradContext* context, const Inputs& in, size_t layer,
                     const Kept& kept, const at::Tensor& dy, const std::function<at::Tensor()>& x,
                     const at::Tensor& factors = {}) {
  const std::vector<at::Tensor> values = in.weights(layer), biases = in.biases(layer);
  const auto weights = weights_at(in.first_weight(layer), values.size());
  if (any_wanted(weights)) {
    auto made = deliver(dy, x(), kept.groups, weights, likes_of(values), kept.store);
    std::move(made.begin(), made.end(), gradients.begin() + static_cast<std::ptrdiff_t>(in.first_weight(layer)));
  }
  std::vector<bool> wanted;
  for (size_t i = 0; i < biases.size(); ++i) wanted.push_back(context->needs_input_grad(in.first_bias(layer) + i));
  if (std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return;
  const at::Tensor rows = factors.defined() ? (dy * factors.unsqueeze(-1)).to(dy.scalar_type()) : dy;
  auto made = bias_gradients(rows, biases, wanted, *kept.groups);
  std::move(made.begin(), made.end(), gradients.begin() + static_cast<std::ptrdiff_t>(in.first_bias(layer)));
}

struct GroupedLinearNode : torch::autograd::Function<GroupedLinearNode> {
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs, const KeptPtr& kept) {
    keep(context, kept);
    context->save_for_backward(inputs.vec());
    const Inputs in(inputs.vec(), *kept);
    const at::Tensor y = grouped_product(in.x().contiguous(), in.weights(0), *kept->groups, Side::forward);
    add_bias(y, in.biases(0), *kept->groups);
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    const KeptPtr kept = kept_by(context);
    const variable_list saved = context->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      const auto function = [&](const variable_list& aliases) {
        const Inputs in(aliases, *kept);
        return plain_grouped_product(in.x(), in.weights(0), in.biases(0), *kept->groups);
      };
      return with_extra(differentiable(function, saved, outputs[0]), 1);
    }
    const Inputs in(saved, *kept);
    const at::Tensor dy = outputs[0].contiguous();
    variable_list gradients(saved.size());
    if (context->needs_input_grad(0)) gradients[0] = grouped_product(dy, in.weights(0), *kept->groups, Side::backward);
    layer_gradients(gradients, context, in, 0, *kept, dy, [&] { return in.x().contiguous(); });
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

// `values` times the factor of its row, in its own dtype.
at::Tensor scaled(const at::Tensor& values, const at::Tensor& factors) {
  return factors.defined() ? (values * factors.unsqueeze(-1)).to(values.scalar_type()) : values;
}

constexpr size_t up = 0, down = 1;  // the layers of an mlp

struct GroupedMLPNode : torch::autograd::Function<GroupedMLPNode> {
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs, const KeptPtr& kept) {
    keep(context, kept);
    const Inputs in(inputs.vec(), *kept);
    const at::Tensor h = grouped_product(in.x().contiguous(), in.weights(up), *kept->groups, Side::forward);
    add_bias(h, in.biases(up), *kept->groups);
    variable_list saved = inputs.vec();
    saved.push_back(h);
    context->save_for_backward(saved);
    const at::Tensor p = in.probabilities();
    const at::Tensor a = scaled(activate(h, kept->activation), p);
    const at::Tensor y = grouped_product(a, in.weights(down), *kept->groups, Side::forward);
    add_bias(y, in.biases(down), *kept->groups, p);
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    const KeptPtr kept = kept_by(context);
    const Groups& groups = *kept->groups;
    variable_list saved = context->get_saved_variables();
    const at::Tensor h = saved.back();
    saved.pop_back();
    if (at::GradMode::is_enabled()) {
      const auto function = [&](const variable_list& aliases) {
        const Inputs in(aliases, *kept);
        const at::Tensor p = in.probabilities();
        const at::Tensor inner = plain_grouped_product(in.x(), in.weights(up), in.biases(up), groups);
        return plain_grouped_product(scaled(activate(inner, kept->activation), p), in.weights(down), in.biases(down),
                                     groups, p);
      };
      return with_extra(differentiable(function, saved, outputs[0]), 1);
    }
    const Inputs in(saved, *kept);
    const at::Tensor p = in.probabilities();
    const at::Tensor dy = outputs[0].contiguous();
    variable_list gradients(saved.size());
    const auto wants = [&](size_t first, size_t count) {
      for (size_t i = first; i < first + count; ++i) {
        if (context->needs_input_grad(i)) return true;
      }
      return false;
    };
    const bool scales = p.defined() && wants(in.at_probabilities(), 1);
    const bool inner =
        wants(0, 1) || wants(in.first_weight(up), kept->weights) || wants(in.first_bias(up), kept->biases);
    if (inner || scales) {
      const at::Tensor da = grouped_product(dy, in.weights(down), groups, Side::backward);
      if (scales) gradients.back() = factor_gradient(da, dy, h, in, *kept);
      if (inner) {
        const at::Tensor dh = activation_gradient(scaled(da, p), h, kept->activation);
        if (wants(0, 1)) gradients[0] = grouped_product(dh, in.weights(up), groups, Side::backward);
        layer_gradients(gradients, context, in, up, *kept, dh, [&] { return in.x().contiguous(); });
      }
    }
    layer_gradients(
        gradients, context, in, down, *kept, dy, [&] { return scaled(activate(h, kept->activation), p); }, p);
    return with_extra(std::move(gradients), 1);
  }

 private:
  // A row's factor has scaled its activation, and its bias.
  static at::Tensor factor_gradient(const at::Tensor& da, const at::Tensor& dy, const at::Tensor& h, const Inputs& in,
                                    const Kept& kept) {
    const auto dtype = in.probabilities().scalar_type();
    at::Tensor gradient = (da * activate(h, kept.activation)).sum(-1, /*keepdim=*/false, dtype);
    if (kept.biases == 0) return gradient;
    const at::Tensor biases = at::zeros_like(dy);
    add_bias(biases, in.biases(down), *kept.groups);
    return gradient.add_((dy * biases).sum(-1, /*keepdim=*/false, dtype));
  }
};

}  // namespace

WithoutAutocast::WithoutAutocast(const at::Tensor& weight)
    : on_(at::autocast::is_autocast_available(weight.device().type()) &&
          at::autocast::is_autocast_enabled(weight.device().type())),
      dtype_(weight.scalar_type()), off_(c10::autocast_dispatch_keyset) {}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  std::shared_ptr<WgradStore> store) {
  const WithoutAutocast without(weight);
  auto kept = c10::make_intrusive<Kept>();
  kept->store = std::move(store);
  return LinearNode::apply(without.taken(x), weight, bias, kept);
}

namespace {

void append(std::vector<at::Tensor>& to, const std::vector<at::Tensor>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

KeptPtr kept_for(const Layer& layer, std::shared_ptr<const Groups> groups, std::shared_ptr<WgradStore> store) {
  auto kept = c10::make_intrusive<Kept>();
  kept->store = std::move(store);
  kept->groups = std::move(groups);
  kept->weights = layer.weights.size();
  kept->biases = layer.biases.size();
  return kept;
}

std::shared_ptr<const Groups> groups_for(const at::Tensor& x, const at::Tensor& weight, const Tokens& tokens,
                                         int64_t experts) {
  if (x.dim() != 2 || x.size(1) != weight.size(-1)) {
    throw Error(c10::str("the input has shape ", x.sizes(), "; expected [rows, ", weight.size(-1), "]"));
  }
  return std::make_shared<const Groups>(tokens, experts, x.size(0), x.device());
}

void check_probabilities(const at::Tensor& probabilities, const at::Tensor& x) {
  if (probabilities.dim() != 1 || probabilities.size(0) != x.size(0)) {
    throw Error(c10::str("the probabilities have shape ", probabilities.sizes(), "; expected [", x.size(0),
                         "], one per row of the input"));
  }
  if (probabilities.device() != x.device() || !probabilities.is_floating_point()) {
    throw Error(c10::str("the probabilities are ", probabilities.scalar_type(), " on ", probabilities.device(),
                         "; expected floating-point numbers on ", x.device(), ", the input's device"));
  }
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& x, const Layer& layer, const Tokens& tokens, int64_t experts,
                          std::shared_ptr<WgradStore> store) {
  const WithoutAutocast without(layer.weights[0]);
  auto groups = groups_for(x, layer.weights[0], tokens, experts);
  std::vector<at::Tensor> inputs = {without.taken(x)};
  append(inputs, layer.weights);
  append(inputs, layer.biases);
  return GroupedLinearNode::apply(at::TensorList(inputs), kept_for(layer, std::move(groups), std::move(store)));
}

at::Tensor grouped_mlp(const at::Tensor& x, const Layer& up, const Layer& down, const at::Tensor& probabilities,
                       Activation activation, const Tokens& tokens, int64_t experts,
                       std::shared_ptr<WgradStore> store) {
  const WithoutAutocast without(up.weights[0]);
  auto groups = groups_for(x, up.weights[0], tokens, experts);
  if (probabilities.defined()) check_probabilities(probabilities, x);
  auto kept = kept_for(up, std::move(groups), std::move(store));
  kept->activation = activation;
  kept->layers = 2;
  std::vector<at::Tensor> inputs = {without.taken(x)};
  append(inputs, up.weights);
  append(inputs, down.weights);
  append(inputs, up.biases);
  append(inputs, down.biases);
  if (probabilities.defined()) inputs.push_back(without.taken(probabilities));
  return GroupedMLPNode::apply(at::TensorList(inputs), kept);
}

}  // namespace plumb::nn

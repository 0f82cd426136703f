// The modules: parameters with their initial values, and the operations behind them.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "nn/groups.h"
#include "nn/ops.h"
#include "nn/product.h"
#include "plumb/error.h"
#include "plumb/nn.h"

namespace plumb::nn {
namespace {

// Uniform in ±1/√in, as torch's own linear layers start.
at::Tensor fresh(at::IntArrayRef sizes, int64_t in) {
  at::NoGradGuard no_grad;
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  return at::empty(sizes).uniform_(-bound, bound);
}

std::shared_ptr<WgradStore> store_if(bool delayed) { return delayed ? std::make_shared<WgradStore>() : nullptr; }

void flush(const std::shared_ptr<WgradStore>& store) {
  if (!store) throw Error("backward_dw() on a module that delays nothing; build it with delay_wgrad_compute");
  store->flush();
}

void check_positive(const char* what, std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size < 1) throw Error(c10::str(what, " with a size of ", size, "; expected 1 or more of everything"));
  }
}

}  // namespace

LinearImpl::LinearImpl(const LinearOptions& options) : store_(store_if(options.delay_wgrad_compute)) {
  check_positive("a linear layer", {options.in, options.out});
  weight = register_parameter("weight", fresh({options.out, options.in}, options.in));
  if (options.bias) bias = register_parameter("bias", fresh({options.out}, options.in));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  return linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, store_);
}

void LinearImpl::backward_dw() { flush(store_); }

// Moves the tensors, one per expert, into one block. Those without memory of their own (deferred, or an engine's to
// gather) stay where they are.
void ExpertsModule::pack() {
  at::NoGradGuard no_grad;
  for (const std::vector<at::Tensor>& each : separate_) {
    const bool whole = std::ranges::all_of(each, [&](const at::Tensor& weight) {
      return weight.storage().nbytes() > 0 && weight.storage().data() != nullptr &&
             weight.options().type_equal(each[0].options()) && weight.device() == each[0].device();
    });
    if (!whole || one_over(each).defined()) continue;
    const at::Tensor block = at::stack(each);
    for (size_t e = 0; e < each.size(); ++e) each[e].set_data(block.select(0, static_cast<int64_t>(e)));
  }
}

void ExpertsModule::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  Module::to(device, dtype, non_blocking);
  pack();
}

void ExpertsModule::to(torch::Dtype dtype, bool non_blocking) {
  Module::to(dtype, non_blocking);
  pack();
}

void ExpertsModule::to(torch::Device device, bool non_blocking) {
  Module::to(device, non_blocking);
  pack();
}

std::vector<at::Tensor> ExpertsModule::register_experts(const std::string& name, Experts kind, int64_t experts,
                                                        int64_t out, int64_t in) {
  if (kind == Experts::grouped) return {register_parameter(name, fresh({experts, out, in}, in))};
  std::vector<at::Tensor> each;
  for (int64_t e = 0; e < experts; ++e) {
    each.push_back(register_parameter(name + "_" + std::to_string(e), fresh({out, in}, in)));
  }
  separate_.push_back(each);
  pack();
  return each;
}

std::vector<at::Tensor> ExpertsModule::register_biases(const std::string& name, Experts kind, int64_t experts,
                                                       int64_t out, int64_t in) {
  if (kind == Experts::grouped) return {register_parameter(name, fresh({experts, out}, in))};
  std::vector<at::Tensor> each;
  for (int64_t e = 0; e < experts; ++e) {
    each.push_back(register_parameter(name + "_" + std::to_string(e), fresh({out}, in)));
  }
  return each;
}

GroupedLinearImpl::GroupedLinearImpl(const GroupedLinearOptions& options)
    : experts_(options.experts), store_(store_if(options.delay_wgrad_compute)) {
  check_positive("a grouped linear layer", {options.experts, options.in, options.out});
  weights = register_experts("weight", options.weights, options.experts, options.out, options.in);
  if (options.bias) biases = register_biases("bias", options.weights, options.experts, options.out, options.in);
}

at::Tensor GroupedLinearImpl::forward(const at::Tensor& x, const Tokens& tokens) {
  return grouped_linear(x, {weights, biases}, tokens, experts_, store_);
}

void GroupedLinearImpl::backward_dw() { flush(store_); }

GroupedMLPImpl::GroupedMLPImpl(const GroupedMLPOptions& options)
    : experts_(options.experts), activation_(options.activation), store_(store_if(options.delay_wgrad_compute)) {
  check_positive("a grouped mlp", {options.experts, options.width, options.hidden});
  const int64_t inner = options.activation == Activation::swiglu ? 2 * options.hidden : options.hidden;
  up = register_experts("up", options.weights, options.experts, inner, options.width);
  down = register_experts("down", options.weights, options.experts, options.width, options.hidden);
  if (!options.bias) return;
  up_biases = register_biases("up_bias", options.weights, options.experts, inner, options.width);
  down_biases = register_biases("down_bias", options.weights, options.experts, options.width, options.hidden);
}

at::Tensor GroupedMLPImpl::forward(const at::Tensor& x, const Tokens& tokens, const at::Tensor& probabilities) {
  return grouped_mlp(x, {up, up_biases}, {down, down_biases}, probabilities, activation_, tokens, experts_, store_);
}

void GroupedMLPImpl::backward_dw() { flush(store_); }

RouterImpl::RouterImpl(int64_t width, int64_t experts, int64_t top_k) : top_k_(top_k) {
  check_positive("a router", {width, experts, top_k});
  if (top_k > experts) throw Error(c10::str("a router with ", top_k, " choices of ", experts, " experts"));
  weight = register_parameter("weight", fresh({experts, width}, width));
}

Routing RouterImpl::forward(const at::Tensor& x) { return route(x, weight, top_k_); }

Routing route(const at::Tensor& input, const at::Tensor& weight, int64_t top_k) {
  const WithoutAutocast without(weight);
  const at::Tensor x = without.taken(input);
  const at::Tensor chances = at::softmax(at::linear(x.to(at::kFloat), weight.to(at::kFloat)), -1);
  auto [best, experts] = chances.topk(top_k, -1);
  Routing routing;
  routing.weights = (best / best.sum(-1, /*keepdim=*/true)).to(x.scalar_type());
  const at::Tensor flat = experts.flatten();
  routing.order = at::argsort(flat, /*stable=*/true, 0, /*descending=*/false);
  // Counted by addition: a histogram would make the host wait for a device.
  routing.sizes = at::zeros({weight.size(0)}, flat.options()).scatter_add_(0, flat, at::ones_like(flat));
  return routing;
}

at::Tensor permute(const at::Tensor& x, const Routing& routing) {
  return x.index_select(0, at::div(routing.order, routing.weights.size(1), "floor"));
}

at::Tensor unpermute(const at::Tensor& y, const Routing& routing, Weigh weigh) {
  const at::Tensor place = at::argsort(routing.order);
  const auto chosen = y.index_select(0, place).view({routing.weights.size(0), routing.weights.size(1), y.size(1)});
  return weigh == Weigh::results ? (chosen * routing.weights.unsqueeze(-1)).sum(1) : chosen.sum(1);
}

at::Tensor permuted_weights(const Routing& routing) { return routing.weights.flatten().index_select(0, routing.order); }

MoEImpl::MoEImpl(const MoEOptions& options) : weigh_(options.weigh) {
  router = register_module("router", Router(options.width, options.experts, options.top_k));
  experts =
      register_module("experts", GroupedMLP(GroupedMLPOptions{.experts = options.experts,
                                                              .width = options.width,
                                                              .hidden = options.hidden,
                                                              .activation = options.activation,
                                                              .weights = options.weights,
                                                              .bias = options.bias,
                                                              .delay_wgrad_compute = options.delay_wgrad_compute}));
}

at::Tensor MoEImpl::forward(const at::Tensor& input) {
  const at::Tensor x = WithoutAutocast(router->weight).taken(input);  // once, as each part of it would
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  const Routing routing = router->forward(tokens);
  const at::Tensor inside = weigh_ == Weigh::activations ? permuted_weights(routing) : at::Tensor();
  const at::Tensor y = experts->forward(permute(tokens, routing), Tokens::sizes(routing.sizes), inside);
  return unpermute(y, routing, weigh_).view(x.sizes());
}

}  // namespace plumb::nn

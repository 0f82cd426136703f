#include "nn/support/fused.h"

#include <gtest/gtest.h>
#include "libtorch.h"

#include "grad/node.h"

namespace plumb::test {
namespace {

constexpr int64_t in = 16, out = 24, hidden = 8;

at::Tensor plain_grouped(const at::Tensor& x, const std::vector<at::Tensor>& weights, const Counts& counts) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    const at::Tensor weight =
        weights.size() == 1 && weights[0].dim() == 3 ? weights[0][static_cast<int64_t>(e)] : weights[e];
    parts.push_back(x.narrow(0, begin, counts[e]).mm(weight.t()));
    begin += counts[e];
  }
  return at::cat(parts);
}

}  // namespace

Subject::Subject(const Setup& chosen) : setup(chosen) {
  torch::manual_seed(11);
  int64_t rows = 0;
  for (const int64_t count : setup.counts) rows += count;
  const auto experts = static_cast<int64_t>(setup.counts.size());
  const auto tokens = nn::Tokens::sizes(at::tensor(setup.counts, at::TensorOptions(setup.device).dtype(at::kLong)));
  const Counts counts = setup.counts;
  int64_t result = out;
  if (setup.kind == Kind::linear) {
    nn::Linear linear(nn::LinearOptions{.in = in, .out = out, .delay_wgrad_compute = setup.delayed});
    linear->to(setup.device, setup.dtype);
    module = linear.ptr();
    weights = {linear->weight};
    run = [linear](const at::Tensor& x) mutable { return linear->forward(x); };
    const at::Tensor bias = linear->bias;
    plain = [bias](const at::Tensor& x, const auto& w) { return at::linear(x, w[0], f64(bias)); };
    flush = [linear]() mutable { linear->backward_dw(); };
  } else if (setup.kind == Kind::grouped_linear) {
    nn::GroupedLinear grouped(nn::GroupedLinearOptions{
        .experts = experts, .in = in, .out = out, .weights = setup.experts, .delay_wgrad_compute = setup.delayed});
    grouped->to(setup.device, setup.dtype);
    module = grouped.ptr();
    weights = grouped->weights;
    run = [grouped, tokens](const at::Tensor& x) mutable { return grouped->forward(x, tokens); };
    plain = [counts](const at::Tensor& x, const auto& w) { return plain_grouped(x, w, counts); };
    flush = [grouped]() mutable { grouped->backward_dw(); };
  } else {
    nn::GroupedMLP mlp(nn::GroupedMLPOptions{.experts = experts,
                                             .width = in,
                                             .hidden = hidden,
                                             .activation = setup.activation,
                                             .weights = setup.experts,
                                             .delay_wgrad_compute = setup.delayed});
    mlp->to(setup.device, setup.dtype);
    module = mlp.ptr();
    weights = mlp->up;
    weights.insert(weights.end(), mlp->down.begin(), mlp->down.end());
    result = in;
    run = [mlp, tokens](const at::Tensor& x) mutable { return mlp->forward(x, tokens); };
    const auto ups = static_cast<std::ptrdiff_t>(mlp->up.size());
    const nn::Activation activation = setup.activation;
    plain = [=](const at::Tensor& x, const std::vector<at::Tensor>& w) {
      const at::Tensor h = plain_grouped(x, {w.begin(), w.begin() + ups}, counts);
      const auto halves = h.chunk(2, -1);
      const at::Tensor a = activation == nn::Activation::gelu ? at::gelu(h) : at::silu(halves[0]) * halves[1];
      return plain_grouped(a, {w.begin() + ups, w.end()}, counts);
    };
    flush = [mlp]() mutable { mlp->backward_dw(); };
  }
  x = at::randn({rows, in}).to(setup.device, setup.dtype).requires_grad_();
  dy = at::randn({rows, result}).to(setup.device, setup.dtype);
}

std::vector<at::Tensor> Subject::reference(const at::Tensor& input, const at::Tensor& output_gradient) const {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& weight : weights) copies.push_back(f64(weight).requires_grad_());
  return torch::autograd::grad({plain(f64(input), copies)}, copies, {f64(output_gradient)});
}

Watch::Watch(const at::Tensor& parameter) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  accumulator->add_post_hook(std::make_unique<PostHook>([seen = seen](const at::Tensor& gradient) {
    ++seen->fired;
    seen->gradients.push_back(gradient);
  }));
  node = std::make_shared<NodePtr>(std::move(accumulator));
}

std::vector<at::Device> devices() {
  std::vector<at::Device> all = {at::kCPU};
  if (torch::cuda::is_available()) all.emplace_back(at::kCUDA, 0);
  return all;
}

at::Tensor f64(const at::Tensor& tensor) { return tensor.detach().to(at::kDouble); }

void expect_close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  ASSERT_TRUE(a.defined());
  ASSERT_EQ(a.sizes(), b.sizes());
  const double size = f64(b).norm().item<double>(), difference = (f64(a) - f64(b)).norm().item<double>();
  EXPECT_LE(difference, tolerance * size);  // NaN fails, too
}

}  // namespace plumb::test

// Routers and mixtures drawn at random against tokens taken one by one in f64.
#include "libtorch.h"

#include "nn/support/drawn.h"

namespace plumb::test {
namespace {

TEST(Property, RoutersChooseTheLikeliestExpertsAndSortTokensByThem) {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Draw draw(seed);
    const auto dtype = draw.of<at::ScalarType>({at::kFloat, at::kBFloat16, at::kDouble});
    const int64_t experts = draw.in(1, 6), k = draw.in(1, experts), width = draw.in(1, 7), tokens = draw.in(0, 9);
    nn::Router router(width, experts, k);
    router->to(dtype);
    const at::Tensor x = (3 * at::randn({tokens, width})).to(dtype).requires_grad_();
    const at::Tensor weight64 = f64(router->weight).requires_grad_(), x64 = f64(x).requires_grad_();
    const at::Tensor scores = x64.mm(weight64.t()).exp();
    const at::Tensor chances = scores / scores.sum(1, true);
    // By hand: the likeliest experts first.
    std::vector<std::vector<int64_t>> chosen;
    std::vector<at::Tensor> lines;
    bool tie = false;
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<std::pair<double, int64_t>> ranked;
      for (int64_t e = 0; e < experts; ++e) ranked.emplace_back(-chances[t][e].item<double>(), e);
      std::sort(ranked.begin(), ranked.end());
      for (int64_t i = 1; i < experts; ++i) tie = tie || ranked[i].first - ranked[i - 1].first < 1e-5;
      chosen.emplace_back();
      std::vector<at::Tensor> line;
      for (int64_t i = 0; i < k; ++i) {
        chosen.back().push_back(ranked[i].second);
        line.push_back(chances[t][ranked[i].second]);
      }
      lines.push_back(at::stack(line) / at::stack(line).sum());
    }
    if (tie) continue;
    const nn::Routing routing = router->forward(x);
    ASSERT_EQ(routing.weights.sizes(), at::IntArrayRef({tokens, k}));
    EXPECT_EQ(routing.weights.scalar_type(), dtype);
    EXPECT_EQ(routing.sizes.scalar_type(), at::kLong);
    EXPECT_EQ(routing.order.scalar_type(), at::kLong);
    // Pairs of one expert keep the tokens' order.
    std::vector<int64_t> order, sizes(static_cast<size_t>(experts), 0);
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < k; ++i) {
          if (chosen[static_cast<size_t>(t)][static_cast<size_t>(i)] != e) continue;
          order.push_back(t * k + i);
          ++sizes[static_cast<size_t>(e)];
        }
      }
    }
    EXPECT_TRUE(routing.order.equal(at::tensor(order, at::kLong))) << "seed " << seed;
    EXPECT_TRUE(routing.sizes.equal(at::tensor(sizes, at::kLong))) << "seed " << seed;
    if (tokens == 0) continue;
    const at::Tensor wanted = at::stack(lines);
    const double near = dtype == at::kBFloat16 ? 2e-2 : 2e-5;  // in f32, whatever the input is
    expect_near(routing.weights, wanted, near, c10::str("seed ", seed));
    const at::Tensor dw = at::randn({tokens, k}).to(dtype);
    routing.weights.backward(dw);
    wanted.backward(f64(dw));
    const double size = f64(dw).norm().item<double>() * f64(x).norm().item<double>();
    EXPECT_LE((f64(router->weight.grad()) - weight64.grad()).norm().item<double>(), near * size);
    EXPECT_EQ(router->weight.grad().scalar_type(), dtype);
    EXPECT_EQ(x.grad().scalar_type(), dtype);
    if (HasFailure()) return;
  }
}

TEST(Property, TokensGoToTheirExpertsAndComeBackWeighted) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Draw draw(seed);
    const auto dtype = draw.of<at::ScalarType>({at::kDouble, at::kFloat, at::kBFloat16});
    const int64_t tokens = draw.in(1, 8), k = draw.in(1, 4), width = draw.in(1, 5);
    nn::Routing routing;
    routing.weights = at::rand({tokens, k}).to(dtype);
    routing.order = at::randperm(tokens * k, at::kLong);
    const at::Tensor x = at::randn({tokens, width}).to(dtype);
    const at::Tensor sent = nn::permute(x, routing), weights = nn::permuted_weights(routing);
    ASSERT_EQ(sent.sizes(), at::IntArrayRef({tokens * k, width}));
    EXPECT_EQ(sent.scalar_type(), dtype);
    EXPECT_EQ(weights.scalar_type(), dtype);
    const at::Tensor y = at::randn({tokens * k, width}).to(dtype);
    at::Tensor weighted = at::zeros({tokens, width}, at::kDouble), bare = at::zeros({tokens, width}, at::kDouble);
    for (int64_t row = 0; row < tokens * k; ++row) {
      const int64_t pair = routing.order[row].item<int64_t>(), token = pair / k, choice = pair % k;
      EXPECT_TRUE(sent[row].equal(x[token])) << "seed " << seed;
      EXPECT_TRUE(weights[row].equal(routing.weights[token][choice])) << "seed " << seed;
      weighted[token] += f64(y[row]) * f64(routing.weights[token][choice]);
      bare[token] += f64(y[row]);
    }
    expect_near(nn::unpermute(y, routing), weighted, tolerance(dtype), c10::str("seed ", seed));
    expect_near(nn::unpermute(y, routing, nn::Weigh::activations), bare, tolerance(dtype), c10::str("seed ", seed));
    EXPECT_EQ(nn::unpermute(y, routing).scalar_type(), dtype);
  }
}

TEST(Property, MixturesAreTheirTokensOneByOneWhereverTheWeightsAreApplied) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Draw draw(seed);
    const int64_t experts = draw.in(1, 5), k = draw.in(1, experts), width = draw.in(1, 6), hidden = draw.in(1, 5);
    const bool bias = draw.coin();
    const auto activation = draw.coin() ? nn::Activation::swiglu : nn::Activation::gelu;
    nn::MoE moe(nn::MoEOptions{.width = width,
                               .hidden = hidden,
                               .experts = experts,
                               .top_k = k,
                               .activation = activation,
                               .weights = draw.coin() ? nn::Experts::grouped : nn::Experts::separate,
                               .bias = bias,
                               .weigh = draw.coin() ? nn::Weigh::results : nn::Weigh::activations});
    moe->to(at::kDouble);
    at::Tensor x = at::randn({draw.in(1, 3), draw.in(1, 4), width}, at::kDouble);
    if (draw.coin()) x = x.transpose(0, 1);  // tokens that no view lays side by side
    x = x.detach().requires_grad_();
    const at::Tensor y = moe->forward(x);
    ASSERT_EQ(y.sizes(), x.sizes());
    const at::Tensor dy = at::randn_like(y);
    auto inputs = moe->parameters();
    inputs.push_back(x);
    const auto got = torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/false, false, /*allow_unused=*/true);
    const at::Tensor flat = x.reshape({-1, width});
    std::vector<at::Tensor> lines;
    const nn::GroupedMLPImpl& mlp = *moe->experts;
    for (int64_t t = 0; t < flat.size(0); ++t) {
      // The router decides in f32, whatever it is given.
      const at::Tensor chances = at::softmax(moe->router->weight.mv(flat[t]), 0);
      auto [best, which] = chances.topk(k);
      best = best / best.sum();
      at::Tensor line = at::zeros({width}, at::kDouble);
      for (int64_t i = 0; i < k; ++i) {
        const int64_t e = which[i].item<int64_t>();
        at::Tensor h = of_expert(mlp.up, 3, e).mv(flat[t]);
        if (bias) h = h + of_expert(mlp.up_biases, 2, e);
        at::Tensor one = of_expert(mlp.down, 3, e).mv(activated(h, activation));
        if (bias) one = one + of_expert(mlp.down_biases, 2, e);
        line = line + best[i] * one;
      }
      lines.push_back(line);
    }
    const at::Tensor plain = at::stack(lines).view(x.sizes());
    expect_near(y, plain, 1e-6, c10::str("seed ", seed));
    const auto wanted = torch::autograd::grad({plain}, inputs, {dy}, false, false, /*allow_unused=*/true);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const at::Tensor reference = wanted[i].defined() ? wanted[i] : at::zeros_like(inputs[i]);
      const double size = std::max(reference.norm().item<double>(), 0.1);  // with one choice, the router's is zero
      ASSERT_TRUE(got[i].defined()) << "seed " << seed << ", input " << i;
      EXPECT_LE((got[i] - reference).norm().item<double>(), 1e-5 * size) << "seed " << seed << ", input " << i;
    }
  }
}

}  // namespace
}  // namespace plumb::test

// Modules drawn at random (sizes, counts, owners, dtypes, frozen weights) against the same function of single rows in f64.
#include "libtorch.h"

#include <map>
#include <random>
#include <set>

#include "nn/groups.h"
#include "nn/support/drawn.h"
#include "nn/wgrad.h"
#include "plumb/error.h"

namespace plumb::test {
namespace {

// ---- one weight's owner

struct Owned {
  at::Tensor leaf, buffer, before;  // no buffer: autograd's
  std::shared_ptr<MainGradSink> sink;
  bool frozen = false;
};

Owned own(Draw& draw, const at::Tensor& leaf, int64_t kind) {
  Owned owned{.leaf = leaf};
  if (kind == 0) return owned;
  const auto dtype = leaf.scalar_type() == at::kDouble ? at::kDouble : draw.coin() ? at::kFloat : leaf.scalar_type();
  owned.buffer = at::randn(leaf.sizes(), at::TensorOptions(at::kDouble)).to(dtype);
  const bool overwrite = kind == 1;
  owned.before = overwrite ? at::zeros_like(owned.buffer) : owned.buffer.clone();
  if (overwrite) owned.buffer.fill_(std::numeric_limits<double>::quiet_NaN());
  MainGrad facts{.main_grad = draw.coin() ? owned.buffer : owned.buffer.view(-1), .overwrite_main_grad = overwrite};
  if (draw.coin()) facts.grad_added_to_main_grad = false;
  owned.sink = attach_main_grad(leaf, facts, "w");
  return owned;
}

void check_weight(const Owned& owned, const at::Tensor& wanted, const std::string& what) {
  const at::ScalarType dtype = owned.leaf.scalar_type();
  if (owned.frozen) {
    EXPECT_FALSE(owned.leaf.grad().defined()) << what;
    if (!owned.sink) return;
    EXPECT_FALSE(owned.sink->facts.grad_added_to_main_grad.value_or(false)) << what;
    if (owned.sink->facts.overwrite_main_grad) {
      EXPECT_TRUE(owned.buffer.isnan().all().item<bool>()) << what;
    } else {
      EXPECT_TRUE(owned.buffer.equal(owned.before)) << what;
    }
    return;
  }
  if (!owned.sink) {
    expect_near(owned.leaf.grad(), wanted, tolerance(dtype), what);
    EXPECT_EQ(owned.leaf.grad().scalar_type(), dtype) << what;
    return;
  }
  EXPECT_FALSE(owned.leaf.grad().defined()) << what;
  expect_near(f64(owned.buffer), wanted + f64(owned.before), tolerance(dtype), what);
  EXPECT_EQ(owned.sink->outstanding(), 0) << what;
}

// ---- grouped modules

TEST(Property, GroupedModulesAreTheirExpertsRowByRow) {
  int with_bias = 0, with_factors = 0, with_frozen = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    Draw draw(seed);
    const auto dtype = draw.of<at::ScalarType>({at::kDouble, at::kDouble, at::kFloat, at::kBFloat16});
    const bool mlp = draw.coin(), bias = draw.coin(), delayed = draw.coin();
    const auto kind = draw.coin() ? nn::Experts::grouped : nn::Experts::separate;
    const auto activation = draw.coin() ? nn::Activation::swiglu : nn::Activation::gelu;
    const int64_t experts = draw.in(1, 5), width = draw.in(1, 9), hidden = draw.in(1, 9), out = draw.in(1, 9);
    const Counts counts = draw.counts(experts);
    const std::vector<int64_t> expert_of = expert_of_rows(counts);
    const auto rows = static_cast<int64_t>(expert_of.size());
    const std::string what = c10::str("seed ", seed, mlp ? " mlp" : " linear", bias ? " bias " : " ", dtype,
                                      delayed ? " delayed" : "", " counts ", at::IntArrayRef(counts));

    nn::GroupedLinear linear{nullptr};
    nn::GroupedMLP both{nullptr};
    std::vector<std::vector<at::Tensor>> weights, biases;
    if (mlp) {
      both = nn::GroupedMLP(nn::GroupedMLPOptions{.experts = experts,
                                                  .width = width,
                                                  .hidden = hidden,
                                                  .activation = activation,
                                                  .weights = kind,
                                                  .bias = bias,
                                                  .delay_wgrad_compute = delayed});
      both->to(dtype);
      weights = {both->up, both->down};
      biases = {both->up_biases, both->down_biases};
    } else {
      linear = nn::GroupedLinear(nn::GroupedLinearOptions{
          .experts = experts, .in = width, .out = out, .weights = kind, .bias = bias, .delay_wgrad_compute = delayed});
      linear->to(dtype);
      weights = {linear->weights};
      biases = {linear->biases};
    }
    // The result before anything is frozen, as f64 leaves.
    std::vector<std::vector<at::Tensor>> weights64, biases64;
    const auto copies = [](const std::vector<at::Tensor>& all) {
      std::vector<at::Tensor> result;
      for (const at::Tensor& one : all) result.push_back(f64(one).requires_grad_());
      return result;
    };
    for (const auto& layer : weights) weights64.push_back(copies(layer));
    for (const auto& layer : biases) biases64.push_back(copies(layer));

    // Rows of the input may lie apart; counts may be sizes or ends, of any integer type.
    at::Tensor x = at::randn({rows, 2 * width}).to(dtype).narrow(1, 0, width);
    if (draw.coin()) x = x.contiguous();
    x = x.detach().requires_grad_(draw.in(0, 3) > 0);
    at::Tensor counted = at::tensor(counts, at::kLong);
    const bool ends = draw.coin();
    if (ends) counted = counted.cumsum(0);
    counted = counted.to(draw.of<at::ScalarType>({at::kLong, at::kInt, at::kShort}));
    const nn::Tokens tokens = ends ? nn::Tokens::ends(counted) : nn::Tokens::sizes(counted);
    at::Tensor factors;
    if (mlp && draw.coin()) {
      ++with_factors;
      factors = at::rand({rows}).to(draw.coin() ? dtype : at::kFloat).requires_grad_(draw.coin());
    }

    std::vector<std::vector<Owned>> owned;
    bool any = x.requires_grad() || (factors.defined() && factors.requires_grad());
    for (const auto& layer : weights) {
      owned.emplace_back();
      for (const at::Tensor& weight : layer) {
        owned.back().push_back(own(draw, weight, draw.in(0, 2)));
        owned.back().back().frozen = draw.in(0, 3) == 0;
        weight.set_requires_grad(!owned.back().back().frozen);
        any = any || weight.requires_grad();
        with_frozen += owned.back().back().frozen;
      }
    }
    for (const auto& layer : biases) {
      for (const at::Tensor& one : layer) {
        one.set_requires_grad(draw.in(0, 3) > 0);
        any = any || one.requires_grad();
      }
      with_bias += !layer.empty();
    }

    const at::Tensor y = mlp ? both->forward(x, tokens, factors) : linear->forward(x, tokens);
    ASSERT_EQ(y.scalar_type(), dtype) << what;
    ASSERT_EQ(y.requires_grad(), any) << what;
    at::Tensor dy = at::randn({rows, 2 * y.size(1)}).to(dtype).narrow(1, 1, y.size(1));
    if (any) y.backward(dy);
    if (any && delayed) mlp ? both->backward_dw() : linear->backward_dw();

    // Row by row.
    const at::Tensor x64 = f64(x).requires_grad_();
    const at::Tensor factors64 = factors.defined() ? f64(factors).requires_grad_() : at::Tensor();
    std::vector<at::Tensor> lines;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t e = expert_of[static_cast<size_t>(row)];
      at::Tensor line = of_expert(weights64[0], 3, e).mv(x64[row]);
      if (bias) line = line + of_expert(biases64[0], 2, e);
      if (mlp) {
        line = of_expert(weights64[1], 3, e).mv(activated(line, activation));
        if (bias) line = line + of_expert(biases64[1], 2, e);
        if (factors.defined()) line = line * factors64[row];
      }
      lines.push_back(line);
    }
    const at::Tensor plain = rows > 0 ? at::stack(lines) : f64(y);
    expect_near(y, plain, tolerance(dtype), what);
    if (!any) continue;
    std::vector<at::Tensor> leaves = {x64};
    for (const auto& layer : weights64) leaves.insert(leaves.end(), layer.begin(), layer.end());
    for (const auto& layer : biases64) leaves.insert(leaves.end(), layer.begin(), layer.end());
    if (factors.defined()) leaves.push_back(factors64);
    if (rows > 0) plain.backward(f64(dy));
    for (const at::Tensor& leaf : leaves) {
      if (!leaf.grad().defined()) leaf.mutable_grad() = at::zeros_like(leaf);
    }
    if (x.requires_grad()) {
      expect_near(x.grad(), x64.grad(), tolerance(dtype), what + ": the input's");
      EXPECT_EQ(x.grad().scalar_type(), dtype);
    }
    if (factors.defined() && factors.requires_grad()) {
      const double near = std::max(tolerance(dtype), tolerance(factors.scalar_type()));
      expect_near(factors.grad(), factors64.grad(), near, what + ": the factors'");
      EXPECT_EQ(factors.grad().scalar_type(), factors.scalar_type());
    }
    for (size_t layer = 0; layer < weights.size(); ++layer) {
      for (size_t i = 0; i < weights[layer].size(); ++i) {
        check_weight(owned[layer][i], weights64[layer][i].grad(), what + c10::str(": weight ", i, " of layer ", layer));
      }
      for (size_t i = 0; i < biases[layer].size(); ++i) {
        const at::Tensor& one = biases[layer][i];
        ASSERT_EQ(one.grad().defined(), one.requires_grad()) << what;
        if (!one.requires_grad()) continue;
        expect_near(one.grad(), biases64[layer][i].grad(), tolerance(dtype), what + c10::str(": bias ", i));
        EXPECT_EQ(one.grad().scalar_type(), dtype);
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(with_bias, 50);
  EXPECT_GT(with_factors, 50);
  EXPECT_GT(with_frozen, 100);
}

TEST(Property, LinearIsOneProductForAnyShapeAndAnyFrozenPart) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Draw draw(seed);
    const auto dtype = draw.of<at::ScalarType>({at::kDouble, at::kFloat, at::kBFloat16});
    const bool bias = draw.coin(), delayed = draw.coin();
    nn::Linear linear(
        nn::LinearOptions{.in = draw.in(1, 9), .out = draw.in(1, 9), .bias = bias, .delay_wgrad_compute = delayed});
    linear->to(dtype);
    const std::string what = c10::str("seed ", seed, " ", dtype, bias ? " bias" : "", delayed ? " delayed" : "");
    std::vector<int64_t> shape;
    for (int64_t i = draw.in(0, 2); i > 0; --i) shape.push_back(draw.in(1, 4));
    shape.push_back(linear->weight.size(1));
    const bool turned = shape.size() == 3 && draw.coin();  // rows that no view lays side by side
    if (turned) std::swap(shape[0], shape[1]);
    const at::Tensor numbers = at::randn(shape).to(dtype);
    const at::Tensor x = (turned ? numbers.transpose(0, 1) : numbers).detach().requires_grad_(draw.coin());
    Owned weight = own(draw, linear->weight, draw.in(0, 2));
    weight.frozen = draw.in(0, 2) == 0;
    linear->weight.set_requires_grad(!weight.frozen);
    if (bias) linear->bias.set_requires_grad(draw.coin());
    const at::Tensor y = linear->forward(x);
    const at::Tensor x64 = f64(x).requires_grad_(), weight64 = f64(linear->weight).requires_grad_();
    const at::Tensor bias64 = bias ? f64(linear->bias).requires_grad_() : at::Tensor();
    at::Tensor plain = at::matmul(x64, weight64.t());
    if (bias) plain = plain + bias64;
    expect_near(y, plain, tolerance(dtype), what);
    EXPECT_EQ(y.scalar_type(), dtype);
    if (!y.requires_grad()) continue;
    const at::Tensor dy = at::randn(y.sizes()).to(dtype);
    y.backward(dy);
    if (delayed) linear->backward_dw();
    plain.backward(f64(dy));
    check_weight(weight, weight64.grad(), what);
    if (x.requires_grad()) expect_near(x.grad(), x64.grad(), tolerance(dtype), what);
    if (bias) {
      ASSERT_EQ(linear->bias.grad().defined(), linear->bias.requires_grad()) << what;
    }
    if (bias && linear->bias.requires_grad()) expect_near(linear->bias.grad(), bias64.grad(), tolerance(dtype), what);
    if (HasFailure()) return;
  }
}

// ---- products

// bf16 products into f32 go block by block of rows: sums of exact products, so f32 tells what was left out or taken twice.
TEST(Property, WeightGradientsOfManyRowsMissNoneAndTakeNoneTwice) {
  int overwritten_in_blocks = 0, added_in_blocks = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Draw draw(seed);
    const auto dtype = draw.of<at::ScalarType>({at::kBFloat16, at::kBFloat16, at::kFloat});
    const auto sums = draw.of<at::ScalarType>({at::kFloat, dtype});
    const int64_t out = draw.in(1, 6), in = draw.in(1, 6);
    Counts counts = {draw.of<int64_t>({0, 1, 1023, 1024, 1025, 2048, 2500}), draw.in(0, 3),
                     draw.of<int64_t>({0, 1500})};
    const bool grouped = draw.coin(), one = draw.coin();
    int64_t rows = grouped ? counts[0] + counts[1] + counts[2] : counts[0];
    // Small integers: every product and every sum is exact in f32.
    const at::Tensor dy = at::randint(-3, 4, {rows, out}).to(dtype), x = at::randint(-3, 4, {rows, in}).to(dtype);
    const nn::Groups groups(nn::Tokens::sizes(at::tensor(grouped ? counts : Counts{rows}, at::kLong)), grouped ? 3 : 1,
                            rows, at::kCPU);
    const int64_t experts = grouped ? 3 : 1;
    std::vector<GradTarget> targets;
    std::vector<at::Tensor> before;
    const auto add_target = [&](at::IntArrayRef sizes) {
      GradTarget target{at::randint(-4, 5, sizes).to(sums), draw.coin()};
      if (!target.accumulate) target.buffer.fill_(std::numeric_limits<double>::infinity());
      before.push_back(target.accumulate ? f64(target.buffer) : at::zeros(sizes, at::kDouble));
      if (targets.size() == 1 && draw.coin()) target.buffer.reset();  // frozen
      targets.push_back(target);
    };
    if (grouped && one) {
      add_target({3, out, in});
    } else {
      for (int64_t e = 0; e < experts; ++e) add_target({out, in});
    }
    nn::write_wgrad(targets, dy, x, grouped ? &groups : nullptr);
    int64_t begin = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = grouped ? counts[static_cast<size_t>(e)] : rows;
      const at::Tensor wanted = f64(dy).narrow(0, begin, count).t().mm(f64(x).narrow(0, begin, count));
      begin += count;
      const size_t i = one && grouped ? 0 : static_cast<size_t>(e);
      if (!targets[i].buffer.defined()) continue;
      const at::Tensor got = one && grouped ? targets[0].buffer[e] : targets[i].buffer;
      const at::Tensor sum = wanted + (one && grouped ? before[0][e] : before[i]);
      if (dtype != sums && count > 1024) ++(targets[i].accumulate ? added_in_blocks : overwritten_in_blocks);
      if (sums == at::kFloat) {
        EXPECT_TRUE(f64(got).equal(sum)) << "seed " << seed << ", expert " << e;
      } else {
        expect_near(got, sum, 1e-2, c10::str("seed ", seed));
      }
    }
  }
  EXPECT_GT(overwritten_in_blocks, 5) << "cases that only several blocks of rows show";
  EXPECT_GT(added_in_blocks, 5);
}

TEST(Property, GroupsAreTheSameFromSizesAndFromRunningSums) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Draw draw(seed);
    const int64_t experts = draw.in(1, 7);
    const Counts counts = draw.counts(experts);
    const at::Tensor sizes = at::tensor(counts, at::kLong), ends = sizes.cumsum(0);
    const int64_t rows = ends[-1].item<int64_t>();
    for (const bool as_ends : {false, true}) {
      const at::Tensor given = (as_ends ? ends : sizes).to(draw.coin() ? at::kInt : at::kLong);
      const nn::Groups groups(as_ends ? nn::Tokens::ends(given) : nn::Tokens::sizes(given), experts, rows, at::kCPU);
      EXPECT_EQ(groups.experts(), experts);
      EXPECT_EQ(groups.sizes(), counts);
      EXPECT_EQ(groups.ends().scalar_type(), at::kInt);
      EXPECT_TRUE(groups.ends().to(at::kLong).equal(ends));
    }
  }
}

// A gradient of a gradient goes through plain operations: bias, factors and all.
// Each of them fits its dtype, and their sum does not.
TEST(Property, GroupsOfNarrowCountsAddUpInWiderNumbers) {
  const Counts counts = {100, 0, 127, 27, 100};
  for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt}) {
    const nn::Groups groups(nn::Tokens::sizes(at::tensor(counts, at::kLong).to(dtype)), 5, 354, at::kCPU);
    EXPECT_EQ(groups.sizes(), counts) << dtype;
    EXPECT_TRUE(groups.ends().equal(at::tensor({100, 100, 227, 254, 354}, at::kInt))) << dtype;
  }
}

TEST(Property, SecondDerivativesOfALinearLayerAreThoseOfItsProduct) {
  for (const bool bias : {false, true}) {
    nn::Linear linear(nn::LinearOptions{.in = 3, .out = 4, .bias = bias});
    linear->to(at::kDouble);
    const at::Tensor x = at::randn({2, 5, 3}, at::kDouble).requires_grad_();
    std::vector<at::Tensor> inputs = linear->parameters();
    inputs.push_back(x);
    const auto penalty = [&](const at::Tensor& y) {
      at::Tensor sum = at::zeros({}, at::kDouble);
      auto first = torch::autograd::grad({y.sin().sum()}, inputs, {}, true, /*create_graph=*/true);
      for (const auto& g : first) sum = sum + g.pow(2).sum();
      auto second = torch::autograd::grad({sum}, inputs);
      first.insert(first.end(), second.begin(), second.end());
      return first;
    };
    const auto got = penalty(linear->forward(x));
    const auto wanted = penalty(at::linear(x, linear->weight, bias ? std::optional(linear->bias) : std::nullopt));
    for (size_t i = 0; i < wanted.size(); ++i) expect_close(got[i], wanted[i], 1e-9);
  }
}

TEST(Property, SecondDerivativesAreThoseOfTheRows) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Draw draw(seed);
    const Counts counts = {2, 0, 3};
    nn::GroupedMLP mlp(nn::GroupedMLPOptions{.experts = 3,
                                             .width = 4,
                                             .hidden = 3,
                                             .activation = draw.coin() ? nn::Activation::swiglu : nn::Activation::gelu,
                                             .weights = draw.coin() ? nn::Experts::grouped : nn::Experts::separate,
                                             .bias = true});
    mlp->to(at::kDouble);
    const at::Tensor x = at::randn({5, 4}, at::kDouble).requires_grad_();
    const at::Tensor factors = at::rand({5}, at::kDouble).requires_grad_();
    std::vector<at::Tensor> inputs = mlp->parameters();
    inputs.push_back(x);
    inputs.push_back(factors);
    const auto penalty = [&](const at::Tensor& y) {
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const auto& g : torch::autograd::grad({y.sin().sum()}, inputs, {}, true, /*create_graph=*/true)) {
        sum = sum + g.pow(2).sum();
      }
      return torch::autograd::grad({sum}, inputs, {}, false, false, /*allow_unused=*/true);
    };
    const auto got = penalty(mlp->forward(x, nn::Tokens::sizes(at::tensor(counts, at::kLong)), factors));
    std::vector<at::Tensor> lines;
    const auto expert_of = expert_of_rows(counts);
    for (int64_t row = 0; row < 5; ++row) {
      const int64_t e = expert_of[static_cast<size_t>(row)];
      const at::Tensor h = of_expert(mlp->up, 3, e).mv(x[row]) + of_expert(mlp->up_biases, 2, e);
      const auto activation = mlp->up[0].size(-2) == 6 ? nn::Activation::swiglu : nn::Activation::gelu;
      lines.push_back(factors[row] *
                      (of_expert(mlp->down, 3, e).mv(activated(h, activation)) + of_expert(mlp->down_biases, 2, e)));
    }
    at::Tensor used = at::stack(lines);
    for (const at::Tensor& input : inputs) used = used + 0 * input.sum();  // experts without rows: zeros, not nothing
    const auto wanted = penalty(used);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor zeros = at::zeros_like(inputs[i]);
      expect_close(got[i].defined() ? got[i] : zeros, wanted[i].defined() ? wanted[i] : zeros, 1e-9);
    }
  }
}

}  // namespace
}  // namespace plumb::test

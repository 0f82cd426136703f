// Any part of an operation may want a gradient alone: it is the one that it has when all want one.
#include "libtorch.h"

#include "nn/support/drawn.h"

namespace plumb::test::wanted {
namespace {

constexpr int64_t width = 4, hidden = 5, outer = 3;
const std::vector<int64_t> counts = {2, 0, 3};

// A module with its inputs, by part: each part wants gradients, or does not.
struct Case {
  std::string name;
  std::vector<std::vector<at::Tensor>> parts;
  std::function<at::Tensor()> run;
  // The same out of torch's own operations.
  std::function<at::Tensor()> plain;

  std::vector<at::Tensor> inputs() const {
    std::vector<at::Tensor> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
  // Those of the parts whose bits are set, which are made to want gradients; the others are not.
  std::vector<at::Tensor> only(unsigned wanted) const {
    std::vector<at::Tensor> found;
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const at::Tensor& one : parts[i]) {
        one.set_requires_grad((wanted >> i & 1U) != 0);
        one.mutable_grad().reset();
        if (one.requires_grad()) found.push_back(one);
      }
    }
    return found;
  }
  unsigned everything() const { return (1U << parts.size()) - 1; }
};

// Each expert's rows by torch's own linear; the factors scale the results.
at::Tensor by_expert(const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases,
                     const at::Tensor& factors = {}) {
  std::vector<at::Tensor> rows;
  int64_t begin = 0;
  for (int64_t e = 0; e < static_cast<int64_t>(counts.size()); ++e) {
    const int64_t count = counts[static_cast<size_t>(e)];
    at::Tensor bias = biases.empty() ? at::Tensor() : of_expert(biases, 2, e);
    if (bias.defined() && factors.defined()) bias = factors.narrow(0, begin, count).unsqueeze(-1) * bias;
    const at::Tensor product = at::linear(x.narrow(0, begin, count), of_expert(weights, 3, e));
    rows.push_back(bias.defined() ? product + bias : product);
    begin += count;
  }
  return at::cat(rows);
}

template <class... Parts>
std::vector<std::vector<at::Tensor>> without_empty(const Parts&... parts) {
  std::vector<std::vector<at::Tensor>> all{parts...};
  std::erase_if(all, [](const auto& part) { return part.empty(); });
  return all;
}

std::vector<Case> cases() {
  torch::manual_seed(3);
  const at::Tensor x = at::randn({5, width}, at::kDouble), factors = at::rand({5}, at::kDouble);
  const nn::Tokens tokens = nn::Tokens::sizes(at::tensor(counts, at::kLong));
  std::vector<Case> all;
  for (const bool bias : {true, false}) {
    const std::string biased = bias ? " with a bias" : "";
    nn::Linear linear(nn::LinearOptions{.in = width, .out = outer, .bias = bias});
    linear->to(at::kDouble);
    std::vector<at::Tensor> its_bias;
    if (bias) its_bias = {linear->bias};
    all.push_back({"a linear layer" + biased, without_empty(std::vector{x}, std::vector{linear->weight}, its_bias),
                   [=]() mutable { return linear->forward(x); },
                   [=] { return at::linear(x, linear->weight, its_bias.empty() ? at::Tensor() : its_bias[0]); }});
    for (const auto kind : {nn::Experts::grouped, nn::Experts::separate}) {
      const std::string by = biased + (kind == nn::Experts::grouped ? ", in one" : ", one by one");
      nn::GroupedLinear layer(
          nn::GroupedLinearOptions{.experts = 3, .in = width, .out = outer, .weights = kind, .bias = bias});
      layer->to(at::kDouble);
      all.push_back({"a grouped layer" + by, without_empty(std::vector{x}, layer->weights, layer->biases),
                     [=]() mutable { return layer->forward(x, tokens); },
                     [=] { return by_expert(x, layer->weights, layer->biases); }});
      for (const auto activation : {nn::Activation::swiglu, nn::Activation::gelu}) {
        nn::GroupedMLP mlp(nn::GroupedMLPOptions{
            .experts = 3, .width = width, .hidden = hidden, .activation = activation, .weights = kind, .bias = bias});
        mlp->to(at::kDouble);
        all.push_back(
            {"a grouped mlp" + by + (activation == nn::Activation::gelu ? ", gelu" : ", swiglu"),
             without_empty(std::vector{x}, mlp->up, mlp->down, mlp->up_biases, mlp->down_biases, std::vector{factors}),
             [=]() mutable { return mlp->forward(x, tokens, factors); },
             [=] {
               const at::Tensor a = activated(by_expert(x, mlp->up, mlp->up_biases), activation);
               return by_expert(a * factors.unsqueeze(-1), mlp->down, mlp->down_biases, factors);
             }});
      }
    }
  }
  return all;
}

TEST(Wanted, EverySubsetOfInputsGetsTheGradientsItHasAmongAll) {
  for (const Case& one : cases()) {
    at::Tensor dy;
    const auto gradients = [&](unsigned wanted) {
      one.only(wanted);
      const at::Tensor y = one.run();
      if (!dy.defined()) dy = at::randn_like(y);
      y.backward(dy);
      std::vector<at::Tensor> found;
      for (const at::Tensor& input : one.inputs()) found.push_back(input.grad());
      return found;
    };
    const auto all = gradients(one.everything());
    const std::vector<at::Tensor> inputs = one.inputs();
    for (unsigned wanted = 1; wanted < one.everything(); ++wanted) {
      const auto some = gradients(wanted);
      for (size_t i = 0; i < some.size(); ++i) {
        SCOPED_TRACE(c10::str(one.name, ", wanted ", wanted, ", input ", i));
        ASSERT_EQ(some[i].defined(), inputs[i].requires_grad());
        if (some[i].defined()) {
          EXPECT_TRUE(some[i].equal(all[i]));
        }
      }
    }
  }
}

// Both ways to leave inputs out: they want no gradient, or autograd::grad does not ask for theirs. What comes can be
// differentiated again, and gives what torch's own operations do.
TEST(Wanted, EverySubsetOfInputsCanBeDifferentiatedAgain) {
  for (const Case& one : cases()) {
    const auto twice = [](const std::function<at::Tensor()>& run, const std::vector<at::Tensor>& of) {
      auto found = torch::autograd::grad({run().sin().sum()}, of, {}, true, /*create_graph=*/true);
      at::Tensor penalty = at::zeros({}, at::kDouble);
      for (const at::Tensor& gradient : found) penalty = penalty + gradient.pow(2).sum();
      const auto second = torch::autograd::grad({penalty}, of, {}, true, false, /*allow_unused=*/true);
      found.insert(found.end(), second.begin(), second.end());
      return found;
    };
    for (unsigned wanted = 1; wanted <= one.everything(); ++wanted) {
      for (const bool asked : {false, true}) {
        SCOPED_TRACE(c10::str(one.name, asked ? ", asked for " : ", wanted ", wanted));
        const std::vector<at::Tensor> of = one.only(wanted);
        if (asked) one.only(one.everything());
        const auto found = twice(one.run, of), plain = twice(one.plain, of);
        for (size_t i = 0; i < found.size(); ++i) {
          const at::Tensor none = at::zeros_like(of[i % of.size()]);  // and undefined are the same
          expect_near(found[i].defined() ? found[i] : none, plain[i].defined() ? plain[i] : none, 1e-10,
                      std::to_string(i));
        }
        for (const at::Tensor& input : one.inputs()) EXPECT_FALSE(input.grad().defined());
      }
      // And by backward().
      const std::vector<at::Tensor> of = one.only(wanted);
      const auto once = torch::autograd::grad({one.plain().sin().sum()}, of);
      one.run().sin().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      for (size_t i = 0; i < of.size(); ++i) {
        SCOPED_TRACE(c10::str(one.name, ", backward, wanted ", wanted));
        expect_near(of[i].grad(), once[i], 1e-10, std::to_string(i));
        of[i].mutable_grad().reset();  // breaks the cycle of weight and graph
      }
    }
  }
}

// The same through autograd::grad, which asks for some and leaves the others alone, once and again.
TEST(Wanted, ByAutogradGradIsTheSameAndCanBeDifferentiatedAgain) {
  for (const Case& one : cases()) {
    const std::vector<at::Tensor> inputs = one.only(one.everything());
    const auto ask = [&](const std::vector<at::Tensor>& of, bool again) {
      return torch::autograd::grad({one.run().sin().sum()}, of, {}, true, again);
    };
    const auto all = ask(inputs, false);
    for (size_t i = 0; i < inputs.size(); ++i) {
      SCOPED_TRACE(c10::str(one.name, ", input ", i));
      const at::Tensor once = ask({inputs[i]}, false)[0], twice = ask({inputs[i]}, true)[0];
      EXPECT_TRUE(once.equal(all[i]));
      EXPECT_TRUE(twice.requires_grad());
      expect_near(twice, all[i], 1e-12, std::to_string(i));
      for (const at::Tensor& input : inputs) EXPECT_FALSE(input.grad().defined());
    }
  }
}

}  // namespace
}  // namespace plumb::test::wanted

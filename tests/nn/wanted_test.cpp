// Any part of a grouped operation may want a gradient alone: it is the one that it has when all want one.
#include "libtorch.h"

#include "nn/support/drawn.h"

namespace plumb::test {
namespace {

TEST(Wanted, EverySubsetOfInputsGetsTheGradientsItHasAmongAll) {
  for (const auto kind : {nn::Experts::grouped, nn::Experts::separate}) {
    for (const auto activation : {nn::Activation::swiglu, nn::Activation::gelu}) {
      torch::manual_seed(3);
      nn::GroupedMLP mlp(nn::GroupedMLPOptions{
          .experts = 3, .width = 4, .hidden = 5, .activation = activation, .weights = kind, .bias = true});
      mlp->to(at::kDouble);
      const nn::Tokens tokens = nn::Tokens::sizes(at::tensor({2, 0, 3}, at::kLong));
      const at::Tensor x = at::randn({5, 4}, at::kDouble), factors = at::rand({5}, at::kDouble);
      const at::Tensor dy = at::randn({5, 4}, at::kDouble);
      // One member of each kind of input.
      const std::vector<std::vector<at::Tensor>> parts = {
          {x}, mlp->up, mlp->down, mlp->up_biases, mlp->down_biases, {factors}};
      const auto gradients = [&](unsigned wanted) {
        std::vector<at::Tensor> found;
        for (size_t i = 0; i < parts.size(); ++i) {
          for (const at::Tensor& one : parts[i]) {
            one.set_requires_grad((wanted >> i & 1U) != 0);
            one.mutable_grad().reset();
          }
        }
        mlp->forward(x, tokens, factors).backward(dy);
        for (const auto& part : parts) {
          for (const at::Tensor& one : part) found.push_back(one.grad());
        }
        return found;
      };
      const auto all = gradients(63);
      for (unsigned wanted = 1; wanted < 63; ++wanted) {
        const auto some = gradients(wanted);
        size_t at = 0;
        for (size_t i = 0; i < parts.size(); ++i) {
          for (size_t j = 0; j < parts[i].size(); ++j, ++at) {
            ASSERT_EQ(some[at].defined(), (wanted >> i & 1U) != 0) << "wanted " << wanted << ", input " << i;
            if (some[at].defined()) {
              EXPECT_TRUE(some[at].equal(all[at])) << "wanted " << wanted << ", input " << i;
            }
          }
        }
      }
    }
  }
}

// The same through autograd::grad, which asks for some and leaves the others alone, once and again.
TEST(Wanted, ByAutogradGradIsTheSameAndCanBeDifferentiatedAgain) {
  torch::manual_seed(5);
  nn::GroupedMLP mlp(nn::GroupedMLPOptions{.experts = 2, .width = 3, .hidden = 4, .bias = true});
  mlp->to(at::kDouble);
  const nn::Tokens tokens = nn::Tokens::sizes(at::tensor({3, 1}, at::kLong));
  const at::Tensor x = at::randn({4, 3}, at::kDouble).requires_grad_();
  const at::Tensor factors = at::rand({4}, at::kDouble).requires_grad_();
  std::vector<at::Tensor> inputs = mlp->parameters();
  inputs.push_back(x);
  inputs.push_back(factors);
  const auto ask = [&](const std::vector<at::Tensor>& of, bool again) {
    return torch::autograd::grad({mlp->forward(x, tokens, factors).sin().sum()}, of, {}, true, again);
  };
  const auto all = ask(inputs, false);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor once = ask({inputs[i]}, false)[0], twice = ask({inputs[i]}, true)[0];
    EXPECT_TRUE(once.equal(all[i])) << i;
    EXPECT_TRUE(twice.requires_grad()) << i;
    expect_near(twice, all[i], 1e-12, std::to_string(i));
    for (const at::Tensor& one : inputs) EXPECT_FALSE(one.grad().defined());
  }
}

}  // namespace
}  // namespace plumb::test

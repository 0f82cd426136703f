// Under autocast fused modules compute in their weights' dtype, so that gradients find their owner: the bits of a call without it.
#include <ATen/autocast_mode.h>

#include <functional>
#include <optional>

#include "nn/support/drawn.h"

namespace plumb::test::weight_dtype {
namespace {

// As `with torch.autocast("cpu", torch.bfloat16)` does.
class Autocast {
 public:
  Autocast() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

const Counts counts = {3, 0, 2};

struct Case {
  std::string name;
  std::vector<at::Tensor> parameters;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& factors)> run;
};

std::vector<Case> cases() {
  torch::manual_seed(5);
  const nn::Tokens tokens = nn::Tokens::sizes(at::tensor(counts, at::kLong));
  std::vector<Case> all;
  const nn::Linear linear(nn::LinearOptions{.in = 4, .out = 3});
  all.push_back({"Linear", linear->parameters(),
                 [=](const at::Tensor& x, const at::Tensor&) { return at::Tensor(linear.ptr()->forward(x)); }});
  const nn::GroupedLinear grouped(nn::GroupedLinearOptions{.experts = 3, .in = 4, .out = 3, .bias = true});
  all.push_back({"GroupedLinear", grouped->parameters(),
                 [=](const at::Tensor& x, const at::Tensor&) { return grouped.ptr()->forward(x, tokens); }});
  const nn::GroupedMLP mlp(nn::GroupedMLPOptions{.experts = 3, .width = 4, .hidden = 5, .bias = true});
  all.push_back({"GroupedMLP", mlp->parameters(), [=](const at::Tensor& x, const at::Tensor& factors) {
                   return mlp.ptr()->forward(x, tokens, factors);
                 }});
  const nn::Router router(4, 16, 3);
  all.push_back({"Router", router->parameters(), [=](const at::Tensor& x, const at::Tensor&) {
                   const nn::Routing routing = router.ptr()->forward(x);
                   return routing.weights * (routing.order.view({-1, 3}) + 1);
                 }});
  for (const nn::Weigh weigh : {nn::Weigh::results, nn::Weigh::activations}) {
    const nn::MoE moe(nn::MoEOptions{.width = 4, .hidden = 5, .experts = 6, .top_k = 2, .bias = true, .weigh = weigh});
    all.push_back(
        {"MoE", moe->parameters(), [=](const at::Tensor& x, const at::Tensor&) { return moe.ptr()->forward(x); }});
  }
  return all;
}

TEST(Autocast, LeavesFusedModulesTheBitsOfACallWithoutIt) {
  for (const Case& one : cases()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(c10::str(one.name, ", input in ", dtype));
      const at::Tensor numbers = at::randn({5, 4}).to(dtype), rows = at::rand({5}).to(dtype);
      const auto gradients = [&](bool under, std::vector<at::Tensor> inputs) {
        for (at::Tensor& input : inputs) input = input.detach().clone().requires_grad_();
        at::Tensor y;
        {
          std::optional<Autocast> autocast;
          if (under) autocast.emplace();
          y = one.run(inputs[0], inputs[1]);
        }
        EXPECT_EQ(y.scalar_type(), at::kFloat);
        y.square().sum().backward();
        std::vector<at::Tensor> found = {y.detach()};
        for (const at::Tensor& input : inputs) found.push_back(input.grad());
        for (const at::Tensor& parameter : one.parameters) {
          found.push_back(parameter.grad());
          parameter.mutable_grad().reset();
        }
        return found;
      };
      const auto found = gradients(true, {numbers, rows});
      const auto wanted = gradients(false, {numbers.to(at::kFloat), rows.to(at::kFloat)});
      for (size_t i = 0; i < wanted.size(); ++i) {
        ASSERT_EQ(found[i].defined(), wanted[i].defined()) << i;
        if (!found[i].defined()) continue;
        EXPECT_EQ(found[i].scalar_type(), i == 1 || i == 2 ? dtype : at::kFloat) << i;
        EXPECT_TRUE(found[i].equal(wanted[i].to(found[i].scalar_type()))) << i;
      }
    }
  }
}

}  // namespace
}  // namespace plumb::test::weight_dtype

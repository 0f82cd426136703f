// Half precision: what is too small for a parameter is kept in its master, wherever that moves, and follows the user.
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

class HalfIn : public testing::TestWithParam<std::tuple<std::string, at::ScalarType>> {};

// Updates of a twentieth of what a parameter can show. The first steps are held back, so that buckets take their order when there
// are masters already; one element is set by the user in between, and the others must not lose what they had gathered.
TEST_P(HalfIn, UpdatesThatRoundToNothingAddUp) {
  const auto& [strategy, dtype] = GetParam();
  const double lr = dtype == at::kHalf ? 2.5e-5 : 2e-4;
  for (const int ranks : {1, 2}) {
    run_local(ranks, [&](World world) {
      std::vector<at::Tensor> parameters;
      NamedTensors named;
      for (int i = 0; i < 3; ++i) {
        parameters.push_back(at::full({5 + 8 * i}, 1.0, dtype).requires_grad_());
        named.emplace_back("p" + std::to_string(i), parameters.back());
      }
      Engine engine(world, named, {}, SGD{.lr = lr},
                    {.strategy = strategy, .bucket_bytes = 40, .accumulate_dtype = at::kFloat});
      std::vector<at::Tensor> masters;
      for (const at::Tensor& p : parameters) masters.push_back(p.detach().to(at::kFloat));
      for (int step = 0; step < 60; ++step) {
        {
          std::optional<NoSync> quiet;
          if (step < 25) quiet.emplace(engine);
          at::Tensor loss = at::zeros({});
          for (int i = 2; i >= 0; --i) loss = loss + parameters[i].to(at::kFloat).sum() * (i + 1);
          loss.backward();
        }
        engine.step();
        engine.zero_grad();
        for (int i = 0; i < 3; ++i) masters[i] -= lr * (i + 1);
        if (step == 30) {
          at::NoGradGuard no_grad;
          for (int i = 0; i < 3; ++i) {
            parameters[i][2] = 3.0;
            masters[i][2] = 3.0;
          }
        }
      }
      for (int i = 0; i < 3; ++i) {
        const at::Tensor found = parameters[i].detach().to(at::kFloat), wanted = masters[i].to(dtype).to(at::kFloat);
        // The sums of f32 differ by their order; a rounding may then fall to the other side.
        const double ulp = dtype == at::kHalf ? 0.001 : 0.008;
        EXPECT_LE(((found - masters[i]).abs() / masters[i]).max().item<double>(), 0.51 * ulp)
            << strategy << " on " << ranks << ": " << found << wanted;
      }
    });
  }
}

TEST_P(HalfIn, WithoutMastersEachUpdateIsThatOfF32Rounded) {
  const auto& [strategy, dtype] = GetParam();
  run_local(2, [&](World world) {
    at::Tensor weight = at::arange(1, 40, at::kFloat).mul(0.37).sin().to(dtype).requires_grad_();
    const at::Tensor before = weight.detach().to(at::kFloat);
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 0.1, .momentum = 0.5},
                  {.strategy = strategy, .accumulate_dtype = at::kFloat, .master_weights = false});
    (weight.to(at::kFloat) * 3).sum().backward();
    engine.step();
    EXPECT_TRUE(engine.full_parameter(weight).equal((before - 0.1F * 3).to(dtype)));
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, HalfIn,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2"),
                                          testing::Values(at::kBFloat16, at::kHalf)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + c10::toString(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace plumb

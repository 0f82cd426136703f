// The flat optimizers against libtorch's own, and what a step leaves behind.
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

struct Small : torch::nn::Module {
  explicit Small(at::ScalarType dtype = at::kFloat) {
    // No generator: ranks are threads, and the default one is the process's.
    weight = register_parameter("weight", torch::arange(35, at::kFloat).mul(1.7).sin().view({7, 5}).to(dtype));
    bias = register_parameter("bias", torch::arange(7, at::kFloat).mul(2.3).cos().to(dtype));
  }
  at::Tensor loss(int step) {
    const auto x = torch::arange(10, at::kFloat).view({2, 5}).sin().add(step * 0.1).to(weight.scalar_type());
    return torch::linear(x, weight, bias).to(at::kFloat).pow(2).mean();
  }
  at::Tensor weight, bias;
};

template <class Options>
void equals_libtorch(Optimizer ours, std::unique_ptr<torch::optim::Optimizer> (*make)(std::vector<at::Tensor>)) {
  Small expected;
  auto optimizer = make(expected.parameters());
  Small model;
  Engine engine(World(), model, ours);
  for (int step = 0; step < 20; ++step) {
    expected.zero_grad();
    expected.loss(step).backward();
    optimizer->step();
    engine.zero_grad();
    model.loss(step).backward();
    engine.step();
  }
  EXPECT_TRUE(at::allclose(model.weight, expected.weight, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(model.bias, expected.bias, 1e-5, 1e-6));
}

TEST(Updater, AdamWEqualsLibtorchs) {
  equals_libtorch<AdamW>(AdamW{.lr = 0.02, .weight_decay = 0.1},
                         [](std::vector<at::Tensor> p) -> std::unique_ptr<torch::optim::Optimizer> {
                           return std::make_unique<torch::optim::AdamW>(
                               p, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
                         });
}
TEST(Updater, SgdWithNesterovMomentumEqualsLibtorchs) {
  equals_libtorch<SGD>(SGD{.lr = 0.02, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
                       [](std::vector<at::Tensor> p) -> std::unique_ptr<torch::optim::Optimizer> {
                         return std::make_unique<torch::optim::SGD>(
                             p, torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.01).nesterov(true));
                       });
}
TEST(Updater, SgdWithDampeningEqualsLibtorchs) {
  equals_libtorch<SGD>(SGD{.lr = 0.02, .momentum = 0.9, .dampening = 0.3},
                       [](std::vector<at::Tensor> p) -> std::unique_ptr<torch::optim::Optimizer> {
                         return std::make_unique<torch::optim::SGD>(
                             p, torch::optim::SGDOptions(0.02).momentum(0.9).dampening(0.3));
                       });
}

TEST(Updater, GivesEachGroupItsOwnValues) {
  Small model;
  const at::Tensor weight = model.weight.detach().clone(), bias = model.bias.detach().clone();
  Options options;
  options.groups.push_back({[](const std::string& name) { return name == "bias"; }, 0.0, 0.0});
  Engine engine(World(), model, SGD{.lr = 0.5}, options);
  (model.weight.sum() + model.bias.sum()).backward();
  engine.step();
  EXPECT_TRUE(at::allclose(model.weight, weight - 0.5));
  EXPECT_TRUE(at::equal(model.bias, bias));
}

TEST(Updater, FollowsTheSchedule) {
  const Schedule schedule{.warmup = 4, .total = 12, .floor = 0.1};
  EXPECT_DOUBLE_EQ(schedule.factor(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.factor(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.factor(4), 1.0);
  EXPECT_NEAR(schedule.factor(8), 0.55, 1e-12);
  EXPECT_NEAR(schedule.factor(12), 0.1, 1e-12);
  EXPECT_NEAR(schedule.factor(99), 0.1, 1e-12);
  EXPECT_DOUBLE_EQ((Schedule{}.factor(7)), 1.0);
  Small model;
  const at::Tensor bias = model.bias.detach().clone();
  Options options;
  options.schedule = schedule;
  Engine engine(World(), model, SGD{.lr = 1.0}, options);
  model.bias.sum().backward();
  EXPECT_DOUBLE_EQ(engine.step().lr, 0.25);
  EXPECT_TRUE(at::allclose(model.bias, bias - 0.25));
}

// Row N2: many micro-batches of bf16 gradients, summed in f32, into f32 masters.
TEST(Updater, SumsBf16GradientsInF32AndKeepsF32Masters) {
  for (int ranks : {1, 2, 4}) {
    constexpr int kMicro = 64, kSteps = 3;
    // The reference: an f32 master, rounded to bf16 for compute, every bf16 gradient added in f32.
    auto gradient = [](const at::Tensor& weight, int rank, int micro) {
      const auto x = (at::arange(35, at::kFloat).view({7, 5}) * (rank + 1) + micro).sin();
      return (weight.to(at::kFloat) * 0.1 + x).to(at::kBFloat16);
    };
    Small start(at::kBFloat16);
    at::Tensor master = start.weight.detach().to(at::kFloat);
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor sum = at::zeros_like(master);
      for (int rank = 0; rank < ranks; ++rank) {
        for (int micro = 0; micro < kMicro; ++micro)
          sum += gradient(master.to(at::kBFloat16), rank, micro).to(at::kFloat) / ranks;
      }
      master -= 1e-3 * sum;
    }
    run_local(ranks, [&](World world) {
      Small model(at::kBFloat16);
      Options options;
      options.accumulate_dtype = at::kFloat;
      Engine engine(world, model, SGD{.lr = 1e-3}, options);
      for (int step = 0; step < kSteps; ++step) {
        for (int micro = 0; micro < kMicro; ++micro) {
          model.weight.backward(gradient(model.weight.detach(), world.rank(), micro));
        }
        EXPECT_EQ(model.weight.grad().scalar_type(), at::kFloat);
        engine.step();
        engine.zero_grad();
      }
      EXPECT_TRUE(at::equal(model.weight.detach(), master.to(at::kBFloat16)) ||
                  at::allclose(model.weight.detach().to(at::kFloat), master, 8e-3, 1e-4));
      const double error = (model.weight.detach().to(at::kFloat) - master).abs().max().item<double>();
      EXPECT_LT(error, (master - master.to(at::kBFloat16).to(at::kFloat)).abs().max().item<double>() * 1.01 + 1e-6)
          << "further from the f32 master than one rounding";
    });
  }
}

TEST(Updater, LeavesAParameterWithoutAGradientAlone) {
  Small model;
  const at::Tensor bias = model.bias.detach().clone();
  Engine engine(World(), model, AdamW{.lr = 0.1, .weight_decay = 0.5});
  model.weight.sum().backward();
  engine.step();
  EXPECT_TRUE(at::equal(model.bias, bias)) << "weight decay on a parameter nobody used";
}

TEST(Updater, KeepsTheUsersReferencesAndStrides) {
  struct Odd : torch::nn::Module {
    Odd() { weight = register_parameter("weight", torch::randn({4, 6}).t()); }
    at::Tensor weight;
  } model;
  const at::Tensor held = model.weight;
  const auto strides = held.strides().vec();
  const at::Tensor before = held.detach().clone();
  Engine engine(World(), model, SGD{.lr = 1});
  (model.weight * torch::arange(24, at::kFloat).view({6, 4})).sum().backward();
  engine.step();
  EXPECT_EQ(held.strides().vec(), strides);
  EXPECT_TRUE(at::allclose(held, before - torch::arange(24, at::kFloat).view({6, 4})));
}

TEST(Updater, HonoursAParameterTheUserChangedBetweenSteps) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Small model(dtype);
    Engine engine(World(), model, SGD{.lr = 1});
    for (int step = 0; step < 2; ++step) {
      {
        at::NoGradGuard no_grad;
        model.weight.fill_(8 + step);
      }
      model.weight.sum().backward();
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(at::allclose(model.weight.detach().to(at::kFloat), at::full({7, 5}, 7.0 + step))) << dtype;
    }
  }
}

}  // namespace
}  // namespace plumb

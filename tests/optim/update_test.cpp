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

// The first update of a momentum is another one than those that follow, for each parameter, whichever are updated with it.
TEST(Updater, DampeningBeginsAnewForEveryParameterOfAStep) {
  const auto model = [] {
    NamedTensors named;
    for (int i = 0; i < 6; ++i) {
      named.emplace_back("p" + std::to_string(i), at::full({20}, 1.0 + i).requires_grad_());
    }
    return named;
  };
  const auto loss = [](const NamedTensors& named, int step) {
    at::Tensor sum = at::zeros({});
    for (int i = 0; i < 6; ++i) {
      if (i % 2 == 0 || step > 0) sum = sum + (i + step + 1) * named[static_cast<size_t>(i)].second.pow(2).sum();
    }
    return sum;
  };
  for (const int64_t bucket_bytes : {100, 4 << 20}) {
    const NamedTensors ours = model(), theirs = model();
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : theirs) parameters.push_back(parameter);
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.01).momentum(0.9).dampening(0.4));
    Engine engine(World(), ours, {}, SGD{.lr = 0.01, .momentum = 0.9, .dampening = 0.4},
                  {.bucket_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes});
    for (int step = 0; step < 3; ++step) {
      for (const NamedTensors* named : {&ours, &theirs}) loss(*named, step).backward();
      engine.step();
      optimizer.step();
      engine.zero_grad();
      optimizer.zero_grad();
      for (size_t i = 0; i < 6; ++i) {
        EXPECT_TRUE(at::allclose(ours[i].second, theirs[i].second, 1e-6, 1e-6)) << ours[i].first << ", step " << step;
      }
    }
  }
}

// torch's optimizers beside ours, in every strategy, with gradients that come only now and then.
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

template <class Made, class Settings>
MakeOptimizer torchs(Settings settings) {
  return [settings](std::vector<at::Tensor> parameters) { return std::make_unique<Made>(parameters, settings); };
}

class UpdaterIn : public testing::TestWithParam<std::string> {};

TEST_P(UpdaterIn, EveryOptimizerEqualsTorchs) {
  using torch::optim::AdamOptions;
  using torch::optim::RMSpropOptions;
  const std::vector<std::pair<Optimizer, MakeOptimizer>> all = {
      {Adam{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-4, .weight_decay = 0.1},
       torchs<torch::optim::Adam>(AdamOptions(0.02).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.1))},
      {AdamW{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-4, .weight_decay = 0.1},
       torchs<torch::optim::AdamW>(torch::optim::AdamWOptions(0.02).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.1))},
      {RMSprop{.lr = 0.02, .alpha = 0.9, .eps = 1e-4, .weight_decay = 0.1},
       torchs<torch::optim::RMSprop>(RMSpropOptions(0.02).alpha(0.9).eps(1e-4).weight_decay(0.1))},
      {RMSprop{.lr = 0.02, .alpha = 0.9, .eps = 1e-2, .momentum = 0.7, .centered = true},
       torchs<torch::optim::RMSprop>(RMSpropOptions(0.02).alpha(0.9).eps(1e-2).momentum(0.7).centered(true))},
      {SGD{.lr = 0.02, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1},
       torchs<torch::optim::SGD>(torch::optim::SGDOptions(0.02).momentum(0.9).dampening(0.1).weight_decay(0.1))},
  };
  for (size_t which = 0; which < all.size(); ++which) {
    for (const int ranks : {1, 2, 3}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        // Gradients of the parameters' dtype, summed in f32; masters in f32, of which parameters are the rounding.
        const auto gradient = [&](const at::Tensor& like, int step, int rank) {
          return (at::arange(like.numel()).view(like.sizes()) * (rank + 1.7) + step).sin().to(dtype);
        };
        const auto used = [](int step, int parameter) { return parameter == 0 ? step != 1 : step % 2 == 1; };
        std::vector<at::Tensor> masters;
        for (const auto& p : Small(dtype).parameters()) masters.push_back(p.detach().to(at::kFloat).requires_grad_());
        const auto optimizer = all[which].second(masters);
        for (int step = 0; step < 6; ++step) {
          for (int i = 0; i < 2; ++i) {
            masters[i].mutable_grad() = at::Tensor();
            if (!used(step, i)) continue;
            at::Tensor sum = at::zeros_like(masters[i]);
            for (int rank = 0; rank < ranks; ++rank) sum += gradient(sum, step, rank).to(at::kFloat) / ranks;
            masters[i].mutable_grad() = sum.detach();
          }
          optimizer->step();
        }
        run_local(ranks, [&](World world) {
          Small model(dtype);
          Options options;
          options.strategy = GetParam();
          options.accumulate_dtype = at::kFloat;
          options.bucket_bytes = options.first_bucket_bytes = world.size() == 2 ? 100 : 4 << 20;
          Engine engine(world, model, all[which].first, options);
          const auto parameters = model.parameters();
          for (int step = 0; step < 6; ++step) {
            for (int i = 0; i < 2; ++i) {
              if (used(step, i)) engine.deliver(parameters[i], gradient(parameters[i], step, world.rank()));
            }
            engine.end_pass();
            engine.step();
            engine.zero_grad();
          }
          for (int i = 0; i < 2; ++i) {
            const at::Tensor found = engine.full_parameter(parameters[i]);
            EXPECT_EQ(found.scalar_type(), dtype);
            const double tolerance = dtype == at::kFloat ? 2e-5 : 8e-3;  // a rounding to bf16 is at most 2^-8
            EXPECT_TRUE(at::allclose(found.to(at::kFloat), masters[i], tolerance, 1e-5))
                << "optimizer " << which << ", " << GetParam() << " on " << ranks << ", " << dtype << ", parameter "
                << i;
          }
        });
      }
    }
  }
}

// Neighbours in one bucket whose groups differ in one value alone, with a schedule above them.
TEST_P(UpdaterIn, NeighboursOfDifferentGroupsAreUpdatedApart) {
  run_local(2, [&](World world) {
    std::vector<at::Tensor> parameters;
    NamedTensors named;
    for (int i = 0; i < 6; ++i) {
      parameters.push_back(at::full({5}, 2.0).requires_grad_());
      named.emplace_back("p" + std::to_string(i), parameters.back());
    }
    Options options{.strategy = GetParam(), .schedule = {.warmup = 4}};
    options.groups.push_back({[](const std::string& name) { return name == "p1"; }, 0.1, 0.5});
    options.groups.push_back({[](const std::string& name) { return name == "p2"; }, 0.1, 0.25});
    options.groups.push_back({[](const std::string& name) { return name == "p4"; }, 0.3, std::nullopt});
    options.groups.push_back({[](const std::string& name) { return name == "p5"; }, std::nullopt, 0.0});
    Engine engine(world, named, {}, SGD{.lr = 0.2, .weight_decay = 1.0}, options);
    std::vector<double> wanted(6, 2.0);
    const std::vector<double> lrs = {0.2, 0.1, 0.1, 0.2, 0.3, 0.2}, decays = {1, 0.5, 0.25, 1, 1, 0};
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& p : parameters) loss = loss + p.sum();
      loss.backward();
      const StepInfo info = engine.step();
      engine.zero_grad();
      EXPECT_NEAR(info.lr, 0.2 * (step + 1) / 4, 1e-12);
      ASSERT_EQ(info.group_lrs.size(), 4U);
      EXPECT_NEAR(info.group_lrs[2], 0.3 * (step + 1) / 4, 1e-12);
      EXPECT_NEAR(info.group_lrs[3], 0.2 * (step + 1) / 4, 1e-12);
      for (int i = 0; i < 6; ++i) wanted[i] -= lrs[i] * (step + 1) / 4 * (1 + decays[i] * wanted[i]);
    }
    for (int i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::allclose(engine.full_parameter(parameters[i]), at::full({5}, wanted[i]), 1e-5)) << i;
    }
  });
}

// Whichever of them have a gradient: what lies beside those that have none is not forgotten. Each in a bucket of its own.
TEST_P(UpdaterIn, FollowsTheUserBesideParametersWithoutAGradient) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool other_memory : {true, false}) {
      for (unsigned used = 1; used < 8; ++used) {
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(dtype, other_memory ? ", other memory" : ", the same memory", ", used ", used));
          const auto values = [&](int64_t first) { return (torch::arange(40) % 7 + first).to(dtype); };
          std::vector<at::Tensor> parameters;
          NamedTensors named;
          for (int i = 0; i < 3; ++i) {
            parameters.push_back(values(i).requires_grad_());
            named.emplace_back("p" + std::to_string(i), parameters.back());
          }
          Options options{.strategy = GetParam()};
          options.bucket_bytes = options.first_bucket_bytes = 16;
          Engine engine(world, named, {}, SGD{.lr = 0.5}, options);
          const auto step = [&](unsigned which) {
            for (int i = 0; i < 3; ++i) {
              if (which >> i & 1U) engine.deliver(parameters[i], at::full({40}, 2.0, dtype));
            }
            engine.end_pass();
            engine.step();
            engine.zero_grad();
          };
          step(7);
          for (int i = 0; i < 3; ++i) {
            if (other_memory) {
              parameters[i].set_data(values(20 + i));
            } else {
              parameters[i].data().copy_(values(20 + i));
            }
          }
          step(used);
          for (int i = 0; i < 3; ++i) {
            const at::Tensor expected = values(20 + i) - (used >> i & 1U);
            EXPECT_TRUE(engine.full_parameter(parameters[i]).equal(expected)) << i << ": " << parameters[i];
          }
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, UpdaterIn, testing::Values("ddp", "zero1", "zero2", "zero3"),
                         [](const auto& info) { return info.param; });

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

// A third of a bf16 gradient is no bf16: the mean is taken in the dtype of the sum.
TEST(Updater, TakesTheMeanOfBf16GradientsInF32) {
  const auto gradient = [](int rank, int micro) {
    return at::arange(70, at::kDouble).mul(rank + 1.3).add(micro).sin().to(at::kBFloat16);
  };
  for (const std::string strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    run_local(3, [&](World world) {
      at::Tensor weight = at::zeros({70}, at::kBFloat16).requires_grad_();
      Options options;
      options.strategy = strategy;
      options.accumulate_dtype = at::kFloat;
      Engine engine(world, NamedTensors{{"w", weight}}, {}, NoOptimizer{}, options);
      at::Tensor mean = at::zeros({70}, at::kDouble);
      for (int micro = 0; micro < 2; ++micro) {
        weight.backward(gradient(world.rank(), micro));
        for (int rank = 0; rank < 3; ++rank) mean += gradient(rank, micro).to(at::kDouble) / 3;
      }
      const double error = (engine.full_gradient(weight).to(at::kDouble) - mean).abs().max().item<double>();
      EXPECT_LT(error, 1e-6) << strategy;
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

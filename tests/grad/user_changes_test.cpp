// What users do to parameters and gradients behind the engine's back: followed, or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <limits>
#include <sstream>

#include "plumb/plumb.h"

namespace plumb {
namespace {

struct One : torch::nn::Module {
  One(int64_t size, double value, at::ScalarType dtype = at::kFloat) {
    p = register_parameter("p", torch::full({size}, value, dtype));
  }
  at::Tensor p;
};

class UserChangesIn : public testing::TestWithParam<std::string> {};

// A whole model that is loaded, or goes to another dtype and back, gets new accumulators.
TEST_P(UserChangesIn, AModelThatIsLoadedIsStillHeardOf) {
  for (const bool on_rank_0 : {false, true}) {
    run_local(2, [&](World world) {
      auto model = std::make_shared<One>(40, 1.0);
      std::stringstream saved;
      torch::save(model, saved);
      Engine engine(world, *model, SGD{.lr = 1}, {.strategy = GetParam()});
      for (int step = 0; step < 3; ++step) {
        if (step == 1) model->to(at::kDouble);
        if (step == 1) model->to(at::kFloat);
        if (step != 1 && on_rank_0) {
          const Gathered all = engine.gathered({model->p}, Access::write);
          saved.seekg(0);
          if (world.rank() == 0) torch::load(model, saved);
        } else if (step != 1) {
          saved.seekg(0);
          torch::load(model, saved);
        }
        (model->p.sum() * (world.rank() ? 3.0 : 1.0)).backward();
        const at::Tensor gradient = engine.full_gradient(model->p);
        EXPECT_TRUE(gradient.eq(2).all().item<bool>()) << "step " << step << ": " << gradient[0];
        engine.step();
        engine.zero_grad();
        const double wanted = step == 1 ? -3 : -1;
        EXPECT_TRUE(engine.full_parameter(model->p).eq(wanted).all().item<bool>()) << "step " << step;
      }
    });
  }
}

// Whoever takes the hooks of a parameter away takes ours along, up to the end of the next backward.
TEST_P(UserChangesIn, AParameterWhoseHooksWereTakenAwayIsStillHeardOf) {
  run_local(2, [&](World world) {
    One model(40, 1.0);
    Engine engine(world, model, SGD{.lr = 1}, {.strategy = GetParam()});
    const auto backward = [&] {
      (model.p.sum() * (world.rank() ? 3.0 : 1.0)).backward();
      EXPECT_TRUE(engine.full_gradient(model.p).eq(2).all().item<bool>());
      engine.step();
      engine.zero_grad();
    };
    backward();
    torch::autograd::impl::clear_hooks(model.p);
    backward();
    model.to(at::kDouble);
    model.to(at::kFloat);  // another accumulator
    backward();
    EXPECT_TRUE(engine.full_parameter(model.p).eq(-5).all().item<bool>());
  });
}

// Each has its own rule; a neighbour's wider one, or a step whose gradients no backward made, changes nothing about it.
TEST_P(UserChangesIn, AWiderNeighbourLeavesAGradientItsDtype) {
  run_local(2, [&](World world) {
    at::Tensor a = at::zeros({7}).requires_grad_(), b = at::zeros({9}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, NoOptimizer{}, {.strategy = GetParam()});
    b.set_grad_dtype(at::kDouble);
    (a.sum() + b.sum()).backward();
    EXPECT_EQ(engine.full_gradient(a).scalar_type(), at::kFloat);
    EXPECT_EQ(engine.full_gradient(b).scalar_type(), at::kDouble);
    EXPECT_TRUE(engine.full_gradient(a).eq(1).all().item<bool>());
  });
}

TEST_P(UserChangesIn, GradientsAsTheyComeAreNeverNarrowerThanTheirParameter) {
  run_local(2, [&](World world) {
    at::Tensor a = at::zeros({7}, at::kDouble).requires_grad_();
    a.set_grad_dtype(std::nullopt);
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    (a.sum() / 3).backward();
    engine.step();
    EXPECT_TRUE(at::allclose(engine.full_parameter(a), at::full({7}, -1.0 / 3, at::kDouble), 1e-15, 1e-15));
  });
}

// In bf16, 2^-10 beside 1 is nothing.
TEST_P(UserChangesIn, SumsAreKeptInTheDtypeThatTheUserChose) {
  for (const bool held : {false, true}) {
    for (const bool whole : {false, true}) {
      run_local(2, [&](World world) {
        at::Tensor a = at::zeros({7}, at::kBFloat16).requires_grad_();
        Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{},
                      {.strategy = GetParam(), .accumulate_dtype = at::kFloat, .hold_unsharded = whole});
        for (const double gradient : {1.0, 1.0 / 1024, 1.0 / 1024}) {
          std::optional<NoSync> quiet;
          if (held) quiet.emplace(engine);
          (a.to(at::kFloat).sum() * gradient).backward();
        }
        a.sum().mul(0).backward();
        EXPECT_TRUE(engine.full_gradient(a).to(at::kDouble).eq(1 + 2.0 / 1024).all().item<bool>())
            << engine.full_gradient(a)[0].item<double>() << held << whole;
      });
    }
  }
}

// The first step's gradients are the user's own; the order in which later ones come is another than that of the state.
TEST_P(UserChangesIn, AStepWithoutABackwardMayComeFirst) {
  run_local(2, [&](World world) {
    const std::vector<int64_t> sizes = {33, 7, 64};
    std::vector<at::Tensor> plain, all;
    NamedTensors named;
    for (const int64_t size : sizes) {
      all.push_back(at::zeros({size}).requires_grad_());
      plain.push_back(at::zeros({size}).requires_grad_());
      named.emplace_back("p" + std::to_string(size), all.back());
    }
    Engine engine(world, named, {}, SGD{.lr = 0.1, .momentum = 0.9}, {.strategy = GetParam()});
    torch::optim::SGD reference(plain, torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      for (auto* parameters : {&all, &plain}) {
        at::Tensor loss = at::zeros({});
        for (size_t i = sizes.size(); i-- > 0;) {  // the last is used first
          const at::Tensor gradient = at::arange(sizes[i], at::kFloat) + static_cast<double>(i) + step;
          if (step == 0) (*parameters)[i].mutable_grad() = gradient;
          loss = loss + ((*parameters)[i] * gradient).sum();
        }
        if (step > 0) loss.backward();
      }
      engine.step();
      reference.step();
      engine.zero_grad();
      reference.zero_grad();
      for (size_t i = 0; i < sizes.size(); ++i) {
        EXPECT_TRUE(at::allclose(engine.full_parameter(all[i]), plain[i], 1e-5, 1e-5)) << step << ", " << i;
      }
    }
  });
}

TEST_P(UserChangesIn, AGradientGivenOtherMemoryBeforeTheStepIsWhatItTakes) {
  if (GetParam() != "ddp" && GetParam() != "zero1") GTEST_SKIP() << "a piece is not given other memory";
  run_local(2, [&](World world) {
    at::Tensor a = at::zeros({7}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    for (int step = 1; step <= 2; ++step) {
      a.sum().backward();
      a.mutable_grad().set_data(at::full({7}, 5.0));
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-5.0 * step).all().item<bool>()) << engine.full_parameter(a);
    }
  });
}

// A sum of large numbers is finite in their own dtype.
TEST_P(UserChangesIn, LargeNumbersAreNotBlamedForThoseThatAreNotFinite) {
  run_local(2, [&](World world) {
    at::Tensor a = at::zeros({7}, at::kDouble).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .nonfinite = NonFinite::error});
    (a.sum() * 1e100).backward();
    (a.sum() * (world.rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0)).backward();
    EXPECT_THAT([&] { engine.step(); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("that of rank 1 was not, in backward 2")));
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, UserChangesIn, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

TEST(UserChanges, AChangeThatLeavesNoVersionReachesTheMasterWeights) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const int ranks : {1, 2}) {
      run_local(ranks, [&](World world) {
        One model(40, 1.0, at::kBFloat16);
        Engine engine(world, model, SGD{.lr = 0}, {.strategy = strategy});
        for (int step = 0; step < 2; ++step) {
          if (step == 1) model.p.data().zero_();
          model.p.sum().backward();
          engine.step();
          engine.zero_grad();
        }
        EXPECT_EQ(engine.full_parameter(model.p).abs().max().item<float>(), 0) << strategy << " on " << ranks;
      });
    }
  }
}

// A gradient that is another's memory, which is scaled and reduced first, or last.
TEST(UserChanges, GradientsThatShareMemoryAreTakenApart) {
  for (const bool swapped : {false, true}) {
    run_local(2, [&](World world) {
      One a(400, 0.0), b(400, 0.0);
      Options options;
      options.bucket_bytes = options.first_bucket_bytes = 1000;
      Engine engine(world, NamedTensors{{"a", a.p}, {"b", b.p}}, {}, SGD{.lr = 1}, options);
      const auto backward = [&](double scale) { ((a.p + 2 * b.p).sum() * (scale * (world.rank() + 1))).backward(); };
      backward(1);
      {
        const NoSync quiet(engine);
        backward(1);
      }
      if (swapped) {
        b.p.mutable_grad() = a.p.grad().detach();
      } else {
        a.p.mutable_grad() = b.p.grad().detach();
      }
      engine.step();
      const double wanted = swapped ? -3 : -6;
      EXPECT_TRUE(a.p.eq(wanted).all().item<bool>()) << a.p[0];
      EXPECT_TRUE(b.p.eq(wanted).all().item<bool>()) << b.p[0];
    });
  }
}

// Passes end in one order on every rank, however the graph went through the engines.
TEST(UserChanges, AGraphMayPassTwoEnginesInAnotherOrderOnAnotherRank) {
  run_local(2, [](World world) {
    One a(4, 1.0), b(4, 1.0);
    Engine first(world, a, SGD{.lr = 1}), second(world, b, SGD{.lr = 1});
    const at::Tensor x = torch::ones({4});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor y = world.rank() == 0 ? torch::relu(x * a.p) * b.p : torch::relu(x * b.p) * a.p;
      y.sum().backward();
      first.step();
      second.step();
      first.zero_grad();
      second.zero_grad();
    }
    EXPECT_TRUE(a.p.equal(b.p));
  });
}

}  // namespace
}  // namespace plumb

// Backwards of sums over so many things (tokens, say): a step is of the mean over all of them.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;

// Each backward of a sum over some number of tokens, other numbers on every rank: the mean over all of them.
class Weighted : public testing::TestWithParam<std::string> {};

TEST_P(Weighted, BackwardsAreTheMeanOverAllThings) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    Draw settings(seed);
    const int ranks = static_cast<int>(settings.whole(1, 3));
    Options options{.strategy = GetParam()};
    if (settings.one_in(2)) options.loss_scale = LossScale{.initial = 256, .interval = 1};
    if (settings.one_in(2)) options.clip_norm = settings.of<double>({0.1, 1e6});
    options.bucket_bytes = options.first_bucket_bytes = 300;
    run_local(ranks, [&](World world) {
      SCOPED_TRACE(c10::str("seed ", seed, " on ", ranks));
      Draw draw(seed + 100);
      Parts model(seed);
      std::vector<at::Tensor> weights;
      for (const auto& p : Parts(seed).parameters()) weights.push_back(p.detach().clone());
      Engine engine(world, model, SGD{.lr = 0.5}, options);
      const auto parameters = model.parameters();
      for (int step = 0; step < 3; ++step) {
        double things = 0;
        std::vector<at::Tensor> sums;
        for (const at::Tensor& one : weights) sums.push_back(at::zeros_like(one));
        for (int64_t micro = draw.whole(1, 3); micro > 0; --micro) {
          std::optional<NoSync> quiet;
          if (draw.one_in(3)) quiet.emplace(engine);
          for (int rank = 0; rank < ranks; ++rank) {
            const auto count = static_cast<double>(rank == 0 && micro == 1 ? 3 : draw.whole(0, 9));
            things += count;
            std::vector<at::Tensor> mine;
            for (size_t i = 0; i < weights.size(); ++i) {
              mine.push_back(noise(weights[i].sizes(), draw.whole(0, 1 << 20)) * count);
              sums[i] = sums[i] + mine.back();
            }
            if (rank == world.rank()) engine.backward(model.loss(mine), false, count);
          }
        }
        double squares = 0;
        for (at::Tensor& sum : sums) {
          sum = sum / things;
          squares += sum.square().sum().item<double>();
        }
        const StepInfo info = engine.step();
        const double norm = std::sqrt(squares);
        double factor = 1;
        if (options.clip_norm) {
          EXPECT_NEAR(info.grad_norm.item<double>(), norm, 1e-9 * norm);
          factor = std::min(1.0, *options.clip_norm / (norm + 1e-6));
        }
        for (size_t i = 0; i < weights.size(); ++i) {
          weights[i] = weights[i] - 0.5 * factor * sums[i];
          EXPECT_LT(distance(engine.full_parameter(parameters[i]), weights[i]), 1e-10) << i << ", step " << step;
        }
        engine.zero_grad();
      }
    });
  }
}

// Before anything came, here and everywhere: it is run again, and nothing needs to be cleared.
TEST_P(Weighted, ABackwardThatFailedWeighsNothing) {
  run_local(2, [](World world) {
    Parts model(3);
    Engine engine(world, model, SGD{.lr = 0.5}, {.strategy = GetParam()});
    std::vector<at::Tensor> before;
    for (const at::Tensor& one : model.parameters()) before.push_back(engine.full_parameter(one));
    const at::Tensor bad = model.loss(ones(1)) * 2;
    bad.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
    EXPECT_ANY_THROW(engine.backward(bad, false, 100.0));
    engine.backward(model.loss(ones(6)), false, 2.0 + 2 * world.rank());
    engine.step();
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_LT(distance(engine.full_parameter(model.parameters()[i]), before[i] - 1), 1e-12) << i;
    }
  });
}

// What is there at the step is no sum of theirs.
TEST_P(Weighted, BackwardsWhoseGradientsWereClearedAreNothingToWhatHasNoWeight) {
  for (const bool deterministic : {false, true}) {
    for (const bool set : {false, true}) {  // by hand; or of a backward
      run_local(2, [&](World world) {
        SCOPED_TRACE(c10::str(deterministic, set));
        at::Tensor p = at::zeros({16}).requires_grad_();
        Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1},
                      {.strategy = GetParam(), .deterministic = deterministic, .virtual_ranks = set ? 2 : 4});
        for (int step = 1; step <= 2; ++step) {
          engine.backward(p.sum() * 3, false, 5.0 + world.rank());
          engine.zero_grad();
          if (set) {
            p.mutable_grad() = at::full({16}, 7.0);
          } else {
            (p * (6 + 2 * world.rank())).sum().backward();
          }
          engine.step();
          engine.zero_grad();
          EXPECT_TRUE(engine.full_parameter(p).eq(-7.0 * step).all().item<bool>()) << engine.full_parameter(p);
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, Weighted, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

// By a hook, where gradients are whole: what came before is gone, and the backward weighs what it weighs.
TEST(Weights, OfABackwardThatClearsGradientsInItsMidstCount) {
  for (const char* strategy : {"ddp", "zero1"}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({40}).requires_grad_(), b = at::zeros({40}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 3}, {.strategy = strategy});
      for (int step = 1; step <= 2; ++step) {
        engine.backward(100 * b.sum(), false, 50.0);
        const at::Tensor h = b * 1;
        h.register_hook([&](const at::Tensor& gradient) {
          engine.zero_grad();
          return gradient;
        });
        engine.backward(h.sum() + 3 * a.sum(), false, 2.0);  // a's comes first
        engine.backward(3 * b.sum(), false, 4.0);
        engine.step();
        engine.zero_grad();
        EXPECT_TRUE(at::allclose(b.detach(), at::full({40}, -2.0 * step))) << b;
        EXPECT_TRUE(a.detach().eq(0).all().item<bool>());
      }
    });
  }
}

TEST(Weights, OfASkippedStepAreThoseOfWhatWasNotClearedBefore) {
  for (const char* strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor p = at::zeros({16}).requires_grad_();
      Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1},
                    {.strategy = strategy, .nonfinite = NonFinite::skip});
      engine.backward(p.sum() * 100, false, 50.0);
      engine.zero_grad();
      engine.backward(p.sum() * 8 + p[0] * (world.rank() == 1 ? INFINITY : 0), false, 4.0);
      EXPECT_TRUE(engine.step().skipped);
      p.mutable_grad().nan_to_num_(0, 8, 8);
      EXPECT_FALSE(engine.step().skipped);
      EXPECT_TRUE(engine.full_parameter(p).eq(-2).all().item<bool>()) << engine.full_parameter(p);
    });
  }
}

// Nothing has begun then: a rank that asks again alone is still beside the others.
TEST(Weights, AWeightOfNoSenseIsRefusedBeforeItsBackward) {
  for (const char* strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      Parts model(5);
      const at::Tensor before = model.parameters()[4].detach().clone();
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = strategy});
      if (world.rank() == 1) {
        for (const double weight : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
          EXPECT_THROW(engine.backward(model.loss(ones(3)), false, weight), Error);
        }
      }
      engine.backward(model.loss(ones(6)), false, 2 + world.rank());
      engine.step();
      EXPECT_LT(distance(engine.full_parameter(model.parameters()[4]), before - 12.0 / 5), 1e-12) << strategy;
    });
  }
}

}  // namespace
}  // namespace plumb

// Loss scaling: gradients are divided once, whatever happens between a backward and the step that uses them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "engine/impl.h"
#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;
using testing::HasSubstr;

class LossScaleIn : public testing::TestWithParam<std::string> {
 protected:
  // `program` on two ranks, with SGD of rate 1: parameters end `drop` below where they began, on every rank.
  void falls_by(double drop, const std::function<void(Engine&, Parts&, const World&)>& program, LossScale rule = {}) {
    run_local(2, [&](World world) {
      Parts model(5);
      std::vector<at::Tensor> before;
      for (const auto& p : model.parameters()) before.push_back(p.detach().clone());
      Options options;
      options.strategy = GetParam();
      options.loss_scale = rule;
      options.clip_norm = 1e9;
      options.bucket_bytes = options.first_bucket_bytes = 200;
      Engine engine(world, model, SGD{.lr = 1}, options);
      program(engine, model, world);
      const auto parameters = model.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_LT(distance(engine.full_parameter(parameters[i]), before[i] - drop), 1e-12)
            << GetParam() << ", rank " << world.rank() << ", parameter " << i;
      }
    });
  }
};

TEST_P(LossScaleIn, GradientsKeptOverAStepAreNotDividedAgain) {
  falls_by(6, [](Engine& engine, Parts& model, const World&) {
    engine.backward(model.loss(ones(2)));
    for (int i = 0; i < 3; ++i) engine.step();
  });
}

TEST_P(LossScaleIn, LossesThatNobodyScaledAreAnErrorAndNothingIsLost) {
  falls_by(7, [](Engine& engine, Parts& model, const World& world) {
    model.loss(ones(2)).backward();
    try {
      engine.step();
      ADD_FAILURE() << "no error on rank " << world.rank();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("never scaled"));
    }
    engine.zero_grad();
    engine.backward(model.loss(ones(7)));
    engine.step();
  });
}

TEST_P(LossScaleIn, LossesAndDeliveriesThatTheUserScaledHimselfAreTaken) {
  falls_by(7, [](Engine& engine, Parts& model, const World&) {
    const double scale = engine.loss_scale();
    (model.loss(ones(2)) * scale).backward();
    for (const at::Tensor& parameter : model.parameters())
      engine.deliver(parameter, at::full_like(parameter, 5 * scale));
    engine.end_pass();
    engine.step();
  });
  falls_by(5, [](Engine& engine, Parts& model, const World&) {
    for (const at::Tensor& parameter : model.parameters()) {
      engine.deliver(parameter, at::full_like(parameter, 5 * engine.loss_scale()));
    }
    engine.end_pass();
    engine.step();
  });
}

TEST_P(LossScaleIn, ALossThatOneRankAloneScaledIsAnErrorOnEveryRank) {
  const auto texts = errors(2, [&](World world) {
    Parts model(5);
    Options options;
    options.strategy = GetParam();
    options.loss_scale = LossScale{};
    Engine engine(world, model, SGD{.lr = 1}, options);
    const at::Tensor loss = model.loss(ones(2));
    (world.rank() ? engine.scale(loss) : loss).backward();
    engine.step();
  });
  EXPECT_THAT(texts, testing::Each(HasSubstr("whether a loss was scaled")));
}

TEST_P(LossScaleIn, NewGradientsAreAddedToKeptOnesAsInOneProcess) {
  // 2, then 2 + 3, then 2 + 3 + 5, the last two backwards in another scale than the first.
  for (const bool holds : {false, true}) {
    falls_by(17,
             [&](Engine& engine, Parts& model, const World& world) {
               for (const double value : {2.0, 3.0, 5.0}) {
                 std::optional<NoSync> quiet;
                 if (holds) quiet.emplace(engine);
                 engine.scale(model.loss(ones(value * (world.rank() ? 0.5 : 1.5)))).backward();
                 quiet.reset();
                 engine.step();
               }
             },
             {.initial = 1024, .interval = 1});
  }
}

TEST_P(LossScaleIn, GradientsSetByHandBeforeTheFirstBackwardCountAsTheyAre) {
  if (GetParam() != "ddp" && GetParam() != "zero1")
    return;  // elsewhere a whole gradient is a contribution, the same road
  falls_by(5, [](Engine& engine, Parts& model, const World&) {
    const auto wanted = ones(3);
    const auto parameters = model.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = wanted[i].clone();
    engine.backward(model.loss(ones(2)));
    engine.step();
  });
}

TEST_P(LossScaleIn, AStepThatWasRefusedCanBeRepeated) {
  falls_by(3 + 2,
           [](Engine& engine, Parts& model, const World& world) {
             engine.backward(model.loss(ones(3)));
             engine.step();
             engine.zero_grad();
             engine.backward(model.loss(ones(2)));
             // Something that every rank finds wrong: a parameter that went to another dtype; with units, one that is in use.
             const at::Tensor bad = GetParam() == "zero3" ? at::Tensor() : model.parameters()[4];
             const at::Tensor whole = bad.defined() ? bad.detach().clone() : bad;
             {
               std::optional<Gathered> scope;
               if (bad.defined()) {
                 at::Tensor(bad).set_data(bad.to(at::kFloat));
               } else {
                 scope.emplace(engine, std::vector<at::Tensor>{model.parameters()[0]}, Access::read);
               }
               EXPECT_THROW(engine.step(), Error) << world.rank();
               EXPECT_THROW(engine.step(), Error) << world.rank();
             }
             if (bad.defined()) at::Tensor(bad).set_data(whole);
             const StepInfo info = engine.step();
             EXPECT_EQ(info.step, 1);
             EXPECT_NEAR(info.grad_norm.item<double>(), 2 * std::sqrt(35 + 3 + 1 + 24 + 37 + 1 + 16 + 5), 1e-9);
             EXPECT_EQ(info.loss_scale, 65536);
             EXPECT_EQ(engine.impl().scaler.scale(), 65536) << "two good steps were counted, not four";
           },
           {.interval = 3});
}

// The scale may change between engine.scale(loss) and the backward, and between two backwards of one graph.
TEST_P(LossScaleIn, ALossScaledBeforeAStepCountsTheSameAfterIt) {
  falls_by(2 + 3 + 3,
           [](Engine& engine, Parts& model, const World&) {
             const at::Tensor one = engine.scale(model.loss(ones(2))), other = engine.scale(model.loss(ones(3)));
             one.backward();
             engine.step();
             engine.zero_grad();
             for (int i = 0; i < 2; ++i) {
               other.backward({}, /*retain_graph=*/true);
               engine.step();
               engine.zero_grad();
             }
           },
           {.initial = 1024, .growth = 4, .interval = 1});
}

TEST_P(LossScaleIn, GradientsOfASkippedStepStayInTheirScale) {
  falls_by(2 + 3,
           [](Engine& engine, Parts& model, const World& world) {
             auto gradients = ones(2);
             if (world.rank() == 1) gradients[4][3] = NAN;
             engine.backward(model.loss(gradients));
             EXPECT_TRUE(engine.step().skipped);
             // The user mends what was broken, and goes on in the lower scale.
             const at::Tensor hurt = model.parameters()[4];
             hurt.mutable_grad().nan_to_num_(2 * 1024.0);
             engine.backward(model.loss(ones(3)));
             const StepInfo info = engine.step();
             EXPECT_FALSE(info.skipped);
             EXPECT_EQ(info.loss_scale, 256);
           },
           {.initial = 1024, .backoff = 0.25});
}

// Without another backward: the scale has fallen since, and the gradients have not.
TEST_P(LossScaleIn, GradientsOfASkippedStepThatWereMendedAreThoseOfTheirOwnBackward) {
  falls_by(2,
           [](Engine& engine, Parts& model, const World& world) {
             auto gradients = ones(2);
             if (world.rank() == 1) gradients[4][3] = NAN;
             engine.backward(model.loss(gradients));
             EXPECT_TRUE(engine.step().skipped);
             model.parameters()[4].mutable_grad().nan_to_num_(2 * 1024.0);
             const double norm = 2 * std::sqrt(35 + 3 + 1 + 24 + 37 + 1 + 16 + 5);
             EXPECT_NEAR(engine.grad_norm().item<double>(), norm, 1e-9);
             const StepInfo info = engine.step();
             EXPECT_FALSE(info.skipped);
             EXPECT_EQ(info.loss_scale, 256);
             EXPECT_NEAR(info.grad_norm.item<double>(), norm, 1e-9);
           },
           {.initial = 1024, .backoff = 0.25});
}

TEST_P(LossScaleIn, TheNormIsThatOfTheTrueGradients) {
  falls_by(0.5, [](Engine& engine, Parts& model, const World&) {
    const double wanted = 0.5 * std::sqrt(35 + 3 + 1 + 24 + 37 + 1 + 16 + 5);
    engine.backward(model.loss(ones(0.5)));
    EXPECT_NEAR(engine.grad_norm().item<double>(), wanted, 1e-12);
    engine.step();
    EXPECT_NEAR(engine.grad_norm().item<double>(), wanted, 1e-12) << "kept over the step";
    engine.zero_grad();
    EXPECT_EQ(engine.grad_norm().item<double>(), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, LossScaleIn, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

// Gradients in memory of their own: a graph of their own, one tensor for two parameters.
TEST(LossScale, KeptGradientsInMemoryOfTheirOwnAreBroughtToTheScaleOnce) {
  at::Tensor a = at::zeros({3}, at::kDouble).requires_grad_(), b = at::zeros({3}, at::kDouble).requires_grad_();
  Options options;
  options.loss_scale = LossScale{.initial = 64};
  Engine engine(World(), NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, options);
  engine.backward((0 * a + 0 * b).sum());  // the buckets take their order
  engine.step();
  engine.zero_grad();
  engine.scale((a * a * a / 3 + a + b).sum()).backward({}, std::nullopt, /*create_graph=*/true);
  engine.step();
  EXPECT_TRUE(a.allclose(at::full({3}, -1.0, at::kDouble))) << a;
  const at::Tensor one = at::full({3}, 2.0, at::kDouble);
  a.mutable_grad() = one;
  b.mutable_grad() = one;
  engine.backward((a + b).sum());
  engine.step();
  EXPECT_TRUE(a.allclose(at::full({3}, -4.0, at::kDouble))) << a;
  EXPECT_TRUE(b.allclose(at::full({3}, -4.0, at::kDouble))) << b;
  EXPECT_TRUE(one.eq(2).all().item<bool>()) << "the user's own tensor";
}

// A step of the user's own that is skipped is over with its beginning, and counts for the scale as one of ours.
TEST(LossScale, MovesAlikeWhereTheUserStepsHimself) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      const LossScale rule{.initial = 64, .backoff = 0.25, .interval = 2, .hysteresis = 2};
      at::Tensor weight = at::zeros({20}, at::kDouble).requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, UserOptimizer{},
                    {.strategy = strategy, .loss_scale = rule});
      Scaler scaler(rule);
      double wanted = 0;
      for (const char how : std::string("..x.xx...xx.")) {
        const bool bad = how == 'x';
        engine.backward((weight * (bad && world.rank() == 1 ? INFINITY : 1.0)).sum());
        const StepInfo info = engine.begin_step();
        EXPECT_EQ(info.loss_scale, scaler.scale());
        EXPECT_EQ(info.skipped, bad);
        if (bad) {
          EXPECT_THROW(engine.pieces(), Error);
          EXPECT_THROW(engine.end_step(), Error);
        } else {
          for (const Piece& piece : engine.pieces()) at::Tensor(piece.weight).sub_(piece.gradient);
          engine.end_step();
          --wanted;
        }
        scaler.settle(bad);
        engine.zero_grad();
        EXPECT_TRUE(engine.full_parameter(weight).eq(wanted).all().item<bool>()) << strategy;
      }
      EXPECT_EQ(engine.loss_scale(), scaler.scale());
    });
  }
}

// Growth, backoff and interval to exact counts, over drawn sequences of good and bad steps.
TEST(LossScale, GrowsAndBacksOffByExactCounts) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    const LossScale rule{draw.of<double>({1, 8, 65536}), draw.of<double>({1, 2, 3}), draw.of<double>({0.5, 0.25}),
                         draw.whole(1, 5)};
    Scaler scaler(rule);
    std::vector<bool> history;
    for (int step = 0; step < 40; ++step) {
      // Counted from the history alone: since the last bad step, every `interval` good ones make it grow once.
      double wanted = rule.initial;
      int64_t run = 0;
      for (const bool skipped : history) {
        run = skipped ? 0 : run + 1;
        if (skipped) wanted *= rule.backoff;
        if (!skipped && run % rule.interval == 0) wanted *= rule.growth;
      }
      ASSERT_DOUBLE_EQ(scaler.scale(), wanted) << "after " << step << " steps";
      history.push_back(draw.one_in(4));
      scaler.settle(history.back());
    }
  }
  const Scaler off(std::nullopt);
  EXPECT_FALSE(off.on());
  EXPECT_EQ(off.scale(), 1);
  const at::Tensor loss = at::ones({});
  EXPECT_TRUE(off.scaled(loss).is_same(loss));
}

// Every field of the rule at once, against what its comments say, told from the whole history each time.
TEST(LossScale, FollowsEveryFieldOfItsRuleOverDrawnHistories) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    LossScale rule;
    rule.initial = draw.of<double>({1, 64, 4096});
    rule.growth = draw.of<double>({1.5, 2, 4});
    rule.backoff = draw.of<double>({0.5, 0.25});
    rule.interval = draw.whole(1, 4);
    rule.minimum = draw.of<double>({0, 1, 16, 100});
    rule.hysteresis = draw.whole(1, 4);
    rule.recovery = draw.one_in(2) ? LossScale::Recovery::at_a_good_step : LossScale::Recovery::when_it_grows;
    rule.delay = draw.whole(0, 3);
    const bool counts_anew = rule.recovery == LossScale::Recovery::at_a_good_step;
    Scaler scaler(rule);
    const int64_t bad = draw.of<int64_t>({2, 3, 6});
    double scale = rule.initial;
    int64_t good = 0, skipped = 0;  // in a row; since they are counted anew
    for (int step = 0; step < 60; ++step) {
      const bool skip = draw.one_in(bad);
      scaler.settle(skip);
      if (skip) {
        good = 0;
        if (++skipped >= rule.hysteresis && scale > rule.minimum) scale = std::max(scale * rule.backoff, rule.minimum);
      } else {
        ++good;
        if (counts_anew) skipped = 0;
        if (good > rule.delay && (good - rule.delay) % rule.interval == 0) {
          scale *= rule.growth;
          skipped = 0;
        }
      }
      ASSERT_DOUBLE_EQ(scaler.scale(), scale) << "after step " << step;
      // A checkpoint of this moment goes on in the same way.
      if (draw.one_in(5)) {
        Scaler other(rule);
        other.restore(scaler.scale(), scaler.good_steps(), scaler.patience());
        scaler = other;
      }
    }
  }
}

// The scales after steps that were good ('.') or skipped ('x').
std::vector<double> scales_after(const LossScale& rule, const std::string& steps) {
  Scaler scaler(rule);
  std::vector<double> scales;
  for (const char step : steps) {
    scaler.settle(step == 'x');
    scales.push_back(scaler.scale());
  }
  return scales;
}

TEST(LossScale, FallsAfterAsManySkippedStepsAsItsHysteresisAndEachTimeAfterThem) {
  EXPECT_EQ(scales_after({.initial = 64, .interval = 100, .hysteresis = 3}, "x.xx.x"),
            (std::vector<double>{64, 64, 64, 32, 32, 16}));
  EXPECT_EQ(scales_after({.initial = 64, .interval = 2, .hysteresis = 2}, "x..x"),
            (std::vector<double>{64, 64, 128, 128}))
      << "a scale that has grown counts anew";
}

TEST(LossScale, CountsSkippedStepsAnewAfterAGoodOneWhereItIsToldTo) {
  const LossScale rule{
      .initial = 64, .interval = 100, .hysteresis = 2, .recovery = LossScale::Recovery::at_a_good_step};
  EXPECT_EQ(scales_after(rule, "x.x.xx"), (std::vector<double>{64, 64, 64, 64, 64, 32}));
}

TEST(LossScale, NeverFallsBelowItsMinimum) {
  EXPECT_EQ(scales_after({.initial = 8, .minimum = 3}, "xxx"), (std::vector<double>{4, 3, 3}));
  EXPECT_EQ(scales_after({.initial = 8, .growth = 1, .interval = 1, .minimum = 8}, "x.x."),
            (std::vector<double>{8, 8, 8, 8}))
      << "a scale that stays";
  EXPECT_EQ(scales_after({.initial = 2, .minimum = 4}, "x"), (std::vector<double>{2}))
      << "nor does it rise by a bad step";
}

TEST(LossScale, PassesOverGoodStepsAfterTheStartAndAfterASkippedOne) {
  EXPECT_EQ(scales_after({.initial = 1, .interval = 2, .delay = 1}, "......"), (std::vector<double>{1, 1, 2, 2, 4, 4}));
  EXPECT_EQ(scales_after({.initial = 2, .interval = 2, .delay = 1}, "x..."), (std::vector<double>{1, 1, 1, 2}));
}

TEST(LossScale, ASkippedStepChangesNothingButBuffers) {
  run_local(2, [](World world) {
    at::Tensor weight = at::ones({4}, at::kDouble).requires_grad_();
    at::Tensor buffer = at::full({2}, world.rank() + 1.0);
    Options options;
    options.loss_scale = LossScale{};
    options.clip_norm = 1;
    Engine engine(world, NamedTensors{{"w", weight}}, NamedTensors{{"b", buffer}}, Adam{.weight_decay = 1}, options);
    buffer.fill_(world.rank() + 5.0);
    engine.backward((weight * (world.rank() ? NAN : 1.0)).sum());
    const StepInfo info = engine.step();
    EXPECT_TRUE(info.skipped);
    EXPECT_FALSE(info.grad_norm.defined());
    EXPECT_TRUE(weight.eq(1).all().item<bool>());
    EXPECT_TRUE(buffer.eq(5).all().item<bool>()) << "rank 0's, after every step";
    engine.zero_grad();
    engine.backward(weight.sum());
    EXPECT_EQ(engine.step().step, 1);
  });
}

// What a skipped step left in its scale goes with a load; gradients that come by hand then are as they are.
TEST_P(LossScaleIn, GradientsSetByHandAfterALoadCountAsTheyAre) {
  std::string folder = testing::TempDir() + "plumb-scale-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  for (const bool weights_alone : {false, true}) {
    for (const bool given_up : {false, true}) {  // the step that was under way; or it was skipped
      SCOPED_TRACE(c10::str(weights_alone, given_up));
      falls_by(2, [&](Engine& engine, Parts& model, const World&) {
        const std::string path = engine.save(folder);
        engine.backward(model.loss(ones(given_up ? 1 : NAN)));
        if (given_up) {
          engine.zero_grad();
        } else {
          EXPECT_TRUE(engine.step().skipped);
        }
        weights_alone ? engine.load_weights(path) : engine.load(path);
        const auto gradients = ones(2);
        for (size_t i = 0; i < gradients.size(); ++i) model.parameters()[i].mutable_grad() = gradients[i];
        EXPECT_FALSE(engine.step().skipped);
      });
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace plumb

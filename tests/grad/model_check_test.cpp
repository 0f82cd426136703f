// Models that no engine can train, each told by name; and what an engine is asked between its steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "errors.h"
#include "grad/support/leaf.h"
#include "plumb/fused.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using test::errors;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::ThrowsMessage;

using test::leaf;

TEST(UntrainableModels, AreToldByTheNameOfTheParameter) {
  const auto inference = [] {
    const c10::InferenceMode mode;
    return at::zeros({2});
  };
  const std::vector<std::tuple<std::string, at::Tensor, std::string>> wrong = {
      {"odd", at::Tensor(), "'odd' is undefined"},
      {"a", leaf({2}), "two parameters are called 'a'"},
      {"odd", leaf({2}) * 2, "'odd' is the result of an operation"},
      {"odd", inference(), "'odd' was made under InferenceMode"},
      {"odd", at::ones({2, 2}).to_sparse(), "'odd' has layout Sparse"},
      {"odd", at::zeros({1, 2}).expand({3, 2}), "'odd' uses the same memory"},
      {"odd", at::zeros({2}, at::kMeta).requires_grad_(), "'odd' is on meta"},
  };
  for (const auto& [name, parameter, word] : wrong) {
    for (const bool first : {false, true}) {
      NamedTensors named = {{"a", leaf({3})}, {"b", leaf({4})}};
      named.emplace(first && name != "a" ? named.begin() : named.end(), name, parameter);
      const bool device = word.ends_with("meta");
      EXPECT_THAT([&] { Engine(World(), named, {}, SGD{}); },
                  ThrowsMessage<Error>(HasSubstr(device && first ? "'a' is on cpu" : word)));
    }
  }
  // Of those that can be trained, one is enough.
  Engine engine(World(), NamedTensors{{"a", at::zeros({2})}, {"b", leaf({2})}, {"c", at::zeros({2})}}, {}, SGD{});
}

// A checkpoint is taken where a step has ended and the next one's first backward has not begun.
TEST(BetweenSteps, IsWhereNoBackwardOfTheNextOneHasBegun) {
  run_local(2, [](World world) {
    at::Tensor a = leaf({3});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    Reducer& reducer = *engine.impl().reducer;
    const auto refuses = [&] {
      try {
        reducer.check_between_steps("saving");
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("saving after"));
        return true;
      }
      return false;
    };
    for (int step = 0; step < 2; ++step) {
      EXPECT_FALSE(refuses());
      const at::Tensor y = a * 1;
      y.register_hook([&](const at::Tensor&) { EXPECT_TRUE(refuses()) << "inside one"; });
      engine.backward(y.sum());
      EXPECT_TRUE(refuses());
      engine.zero_grad();
      EXPECT_TRUE(refuses()) << "it has begun all the same";
      // Where the ranks tell each other what each of them finds, that is enough, unless something is still to come.
      const auto looks = [&] { reducer.check_between_steps("loading", Reducer::Cleared::is_enough); };
      EXPECT_NO_THROW(looks());
      const auto sink = sink_of(a);
      sink->put_off();
      EXPECT_THAT(looks, ThrowsMessage<Error>(AllOf(HasSubstr("loading while"), HasSubstr("backward_dw()"))));
      sink->made_up();
      engine.step();
      EXPECT_FALSE(refuses());
      {
        const NoSync quiet(engine);
        a.sum().backward();
      }
      EXPECT_TRUE(refuses());
      engine.step();
      engine.zero_grad();
    }
    // A run that goes on is between steps, too, and counts on from there.
    reducer.resume(7);
    EXPECT_FALSE(refuses());
    EXPECT_EQ(engine.steps(), 7);
    a.sum().backward();
    EXPECT_EQ(reducer.here(Where::Kind::backward).step, 7);
    EXPECT_EQ(reducer.here(Where::Kind::backward).pass, 1);
    engine.step();
    EXPECT_EQ(engine.steps(), 8);
  });
}

// Between two backwards, a weight gradient that was put off waits for the next reduction: nobody is answered for its bucket, and
// everybody for the others.
TEST(BetweenSteps, WhatWasPutOffIsNoMeanYet) {
  for (const std::string strategy : {"ddp", "zero2"}) {
    for (const std::string late : {"a", "b"}) {  // whichever bucket that is
      run_local(2, [&](World world) {
        const NamedTensors named{{"a", leaf({64})}, {"b", leaf({64})}};
        const at::Tensor &a = named[late == "a" ? 0 : 1].second, &b = named[late == "a" ? 1 : 0].second;
        Engine engine(world, named, {}, SGD{.lr = 1},
                      {.strategy = strategy, .bucket_bytes = 64, .first_bucket_bytes = 64});
        for (int step = 1; step <= 2; ++step) {
          (named[0].second.sum() + named[1].second.sum()).backward();  // they lie as they come
          const auto sink = sink_of(a);
          sink->put_off();
          EXPECT_THAT([&] { engine.step(); },
                      ThrowsMessage<Error>(AllOf(HasSubstr("1 weight gradient of parameter '" + late + "'"),
                                                 HasSubstr("backward_dw()"))));
          const GradTarget target = sink->open();
          const at::Tensor mine = at::full({64}, 2.0 * world.rank());
          target.accumulate ? target.buffer.add_(mine) : target.buffer.copy_(mine);
          sink->wrote();
          sink->made_up();
          const auto refused = ThrowsMessage<Error>(HasSubstr("backward_dw()"));
          EXPECT_THAT([&] { engine.full_gradient(a); }, refused);
          EXPECT_THAT([&] { engine.grad_norm(); }, refused);
          EXPECT_TRUE(engine.full_gradient(b).eq(1).all().item<bool>());
          if (step == 2) {
            b.sum().backward();  // reduces it
            EXPECT_TRUE(engine.full_gradient(a).eq(2).all().item<bool>());
          }
          engine.step();
          EXPECT_TRUE(engine.full_gradient(a).eq(2).all().item<bool>());
          engine.zero_grad();
          EXPECT_TRUE(engine.full_parameter(a).eq(-2.0 * step).all().item<bool>());
        }
      });
    }
  }
}

// It waits for nothing after the step before which it was cleared.
TEST(BetweenSteps, WhatWasPutOffAndClearedIsGone) {
  for (const std::string strategy : {"ddp", "zero2", "zero3", "hsdp"}) {
    for (const bool goes_on : {false, true}) {  // with another backward, or with step()
      run_local(strategy == "hsdp" ? 4 : 2, [&](World world) {
        at::Tensor a = leaf({64}), b = leaf({64});
        Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                      {.strategy = strategy, .bucket_bytes = 64, .first_bucket_bytes = 64});
        (a.sum() + b.sum()).backward();
        const auto sink = sink_of(a);
        sink->put_off();
        sink->open().buffer.fill_(5);
        sink->wrote();
        sink->made_up();
        engine.zero_grad();
        if (goes_on) (2 * a.sum()).backward();
        engine.step();
        const double wanted = goes_on ? 2 : 0;
        EXPECT_NEAR(engine.grad_norm().item<float>(), 8 * wanted, 1e-5) << strategy;
        EXPECT_EQ(engine.full_gradient(a).defined(), goes_on) << strategy;
        EXPECT_TRUE(engine.full_parameter(a).eq(-wanted).all().item<bool>()) << strategy;
        EXPECT_TRUE(engine.full_parameter(b).eq(0).all().item<bool>()) << strategy;
      });
    }
  }
}

// Replicas hold their piece until the next sum: what waits to be added to it would not be scaled with it.
TEST(BetweenSteps, AGradientThatSomethingWaitsForIsNotChangedInPlaceWhereReplicasHoldIt) {
  const auto texts = errors(4, [](World world) {
    at::Tensor a = leaf({64});
    Engine engine(world, NamedTensors{{"layer.a", a}}, {}, SGD{.lr = 1},
                  {.strategy = "hsdp", .mesh = {.replicate = 2, .shard = 2}});
    a.sum().backward();
    if (world.rank() == 0) {
      const auto sink = sink_of(a);
      sink->put_off();
      const GradTarget target = sink->open();
      EXPECT_FALSE(target.accumulate);
      target.buffer.fill_(1);
      sink->wrote();
      sink->made_up();
    }
    a.mutable_grad().mul_(2);
    a.sum().backward();
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("'layer.a'"), HasSubstr("was put off waits to be added")));
  for (int rank = 1; rank < 4; ++rank) EXPECT_THAT(texts[static_cast<size_t>(rank)], HasSubstr("failed on rank 0"));
}

// What lies in the buckets moves along, and what is the user's own stays his.
TEST(BetweenSteps, AnOrderThatIsTakenLeavesGradientsAsTheyAre) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor a = leaf({3}), b = leaf({40}), c = leaf({5});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}, {"c", c}}, {}, SGD{.lr = 1}, {.strategy = strategy});
      EXPECT_FALSE(engine.full_gradient(c).defined());
      b.mutable_grad() = at::full({40}, 4.0 * world.rank());
      engine.impl().reducer->arrange({"b", "c", "a"});
      EXPECT_EQ(engine.impl().reducer->order(), (std::vector<std::string>{"b", "c", "a"}));
      a.mutable_grad() = at::full({3}, 6.0 * world.rank());
      engine.step();
      const at::Tensor found = engine.full_gradient(b);
      EXPECT_TRUE(found.eq(2).all().item<bool>()) << strategy;
      const at::Tensor copy = engine.full_gradient(a);
      copy.zero_();  // the caller's own
      EXPECT_TRUE(engine.full_gradient(a).eq(3).all().item<bool>()) << strategy;
      EXPECT_FALSE(engine.full_gradient(c).defined());
      engine.full_parameter(a).zero_();
      EXPECT_TRUE(engine.full_parameter(a).eq(-3).all().item<bool>()) << strategy;
      EXPECT_TRUE(engine.full_parameter(b).eq(-2).all().item<bool>()) << strategy;
    });
  }
}

// Of an order that was saved: taken where gradients and state may still move.
TEST(BetweenSteps, AnOrderIsTakenUpToTheFirstStepAndLaterWhereStateIsWhole) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    for (const bool stepped : {false, true}) {
      run_local(2, [&](World world) {
        at::Tensor a = leaf({3}), b = leaf({40});
        Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1, .momentum = 0.5},
                      {.strategy = strategy});
        Reducer& reducer = *engine.impl().reducer;
        if (stepped) engine.step();
        const std::vector<std::string> before = reducer.order(), wanted = {before[1], before[0]};
        reducer.arrange(wanted);
        const bool moves = plumb::strategy(strategy).parameter == Placement::replicated &&
                           (!stepped || plumb::strategy(strategy).state == Placement::replicated);
        EXPECT_EQ(reducer.order(), moves ? wanted : before) << strategy << (stepped ? ", stepped" : "");
        EXPECT_EQ(reducer.rebuilt(), moves);
        double value = 0, momentum = 0;
        for (int step = 0; step < 3; ++step) {
          (a.sum() + b.sum() * (world.rank() + 1)).backward();
          engine.step();
          engine.zero_grad();
          momentum = 0.5 * momentum + 1.5;
          value -= momentum;
          EXPECT_TRUE(engine.full_parameter(b).allclose(at::full({40}, value))) << strategy << step;
        }
      });
    }
  }
}

}  // namespace
}  // namespace plumb

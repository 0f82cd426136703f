// engine.pass(): the backwards inside of it are one pass, reduced when it ends, and one that fails among them is told to all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "errors.h"
#include "grad/support/leaf.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"

namespace plumb {
namespace {

using test::errors;
using testing::Each;
using testing::HasSubstr;

using test::leaf;

class PassIn : public testing::TestWithParam<std::string> {};

TEST_P(PassIn, IsOneHoweverManyBackwardsItHolds) {
  run_local(4, [](World world) {
    at::Tensor a = leaf(5), b = leaf(40);
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .bucket_bytes = 64, .first_bucket_bytes = 64});
    for (int step = 1; step <= 3; ++step) {
      {
        const auto pass = engine.pass();
        for (int i = 0; i < 3; ++i) {
          (a.sum() * (world.rank() + i)).backward();
          if (i == 1) b.sum().backward();
        }
      }
      EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, 1);
      EXPECT_TRUE(engine.full_gradient(a).eq(7.5).all().item<bool>());
      EXPECT_TRUE(engine.full_gradient(b).eq(1).all().item<bool>());
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-7.5 * step).all().item<bool>());
      EXPECT_TRUE(engine.full_parameter(b).eq(-1.0 * step).all().item<bool>());
    }
  });
}

// Its gradients may be reduced by then; cleared ones would count all the same.
TEST_P(PassIn, ClearsNoGradientsBeforeItEnds) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = leaf(5), b = leaf(40);
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .bucket_bytes = 64, .first_bucket_bytes = 64});
    std::string said;
    {
      const auto pass = engine.pass();
      (a.sum() + b.sum()).backward();
      try {
        engine.zero_grad();
      } catch (const Error& error) {
        said = error.what();
      }
      (2 * a.sum()).backward();
    }
    // And nothing is lost.
    EXPECT_TRUE(engine.full_gradient(a).eq(3).all().item<bool>());
    EXPECT_TRUE(engine.full_gradient(b).eq(1).all().item<bool>());
    engine.zero_grad();
    if (!said.empty()) throw Error(said);
  });
  EXPECT_THAT(texts, Each(HasSubstr("zero_grad() between the backwards of one pass")));
}

// Whichever of them it is, and though the program goes on: the sum lacks what it did not bring.
TEST_P(PassIn, FailsOnEveryRankWithAnyOfItsBackwards) {
  for (int which = 0; which < 3; ++which) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf(5), b = leaf(40);
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
      const auto run = [&](bool fails) {
        const auto pass = engine.pass();
        for (int i = 0; i < 3; ++i) {
          const at::Tensor y = a * 2;
          if (fails && i == which) {
            y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
          }
          try {
            (y.sum() + b.sum()).backward();
          } catch (const std::exception&) {
            EXPECT_TRUE(fails && i == which);
          }
        }
      };
      for (int step = 1; step <= 2; ++step) {
        EXPECT_THAT(
            [&] { run(world.rank() == 1); },
            testing::ThrowsMessage<std::exception>(HasSubstr(world.rank() == 1 ? "planned" : "failed on rank 1")));
        engine.zero_grad();
        run(false);
        engine.step();
        engine.zero_grad();
        EXPECT_TRUE(engine.full_parameter(a).eq(-6.0 * step).all().item<bool>());
        EXPECT_TRUE(engine.full_parameter(b).eq(-3.0 * step).all().item<bool>());
      }
    });
    EXPECT_THAT(texts, Each("none")) << which;
  }
}

// Takes no part in the result, and says so in the backward.
struct Bystander : torch::autograd::Function<Bystander> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

// Also where that is said once more, after its bucket's reduction has begun.
TEST_P(PassIn, GivesNoGradientToWhatEveryUseLeavesOut) {
  run_local(2, [](World world) {
    at::Tensor v = leaf(40), w = at::ones({5}).requires_grad_();
    Engine engine(world, NamedTensors{{"v", v}, {"w", w}}, {}, SGD{.lr = 1, .weight_decay = 0.5},
                  {.strategy = GetParam(), .bucket_bytes = 64, .first_bucket_bytes = 64});
    const scenarios::Checkpoint::Body body = [&](const at::Tensor& x) { return Bystander::apply(x, w); };
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = at::ones({}).requires_grad_();
      (scenarios::checkpoint(body, scenarios::checkpoint(body, x)) * (v.sum() + 1)).backward();
      EXPECT_TRUE(v.grad().defined());
      EXPECT_FALSE(w.grad().defined()) << step;
      engine.step();
      EXPECT_TRUE(engine.full_parameter(w).eq(1).all().item<bool>()) << step;
      engine.zero_grad();
    }
  });
}

// Used in two checkpoints on one rank alone: its reduction has begun when the second gradient comes, which is added to a mean that
// the other rank then holds, too.
TEST_P(PassIn, CountsWhatARankNeverReachesThoughItsGradientComesTwiceElsewhere) {
  run_local(2, [](World world) {
    at::Tensor v = leaf(40), w = at::ones({5}).requires_grad_();
    Engine engine(world, NamedTensors{{"v", v}, {"w", w}}, {}, NoOptimizer{},
                  {.strategy = GetParam(), .bucket_bytes = 64, .first_bucket_bytes = 64});
    const scenarios::Checkpoint::Body body = [&](const at::Tensor& x) { return x * w.sum(); };
    for (int pass = 0; pass < 3; ++pass) {
      const at::Tensor x = at::ones({}).requires_grad_();
      const at::Tensor twice = world.rank() == 0 ? scenarios::checkpoint(body, scenarios::checkpoint(body, x)) : x * 1;
      (twice * (v.sum() + 1)).backward();
      EXPECT_TRUE(engine.full_gradient(w).eq(5).all().item<bool>()) << engine.full_gradient(w);
      EXPECT_TRUE(engine.full_gradient(v).eq(13).all().item<bool>()) << engine.full_gradient(v);
      engine.zero_grad();
    }
  });
}

// Of two engines that fail at the end of one graph, the first one's error, or that of the graph itself, is told.
TEST_P(PassIn, TellsTheFirstOfSeveralErrors) {
  for (const bool itself : {false, true}) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf(5), b = leaf(5), wrong_a = leaf(5), wrong_b = leaf(5);
      Engine first(world, NamedTensors{{"a", a}, {"wrong_a", wrong_a}}, {}, SGD{}, {.strategy = GetParam()});
      Engine second(world, NamedTensors{{"b", b}, {"wrong_b", wrong_b}}, {}, SGD{}, {.strategy = GetParam()});
      wrong_a.mutable_grad() = at::ones({2, 3});
      wrong_b.mutable_grad() = at::ones({2, 3});
      const at::Tensor x = at::ones({5}).requires_grad_(), last = x * 1;
      if (itself) last.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      (last.sum() + a.sum() + b.sum()).backward();
    });
    EXPECT_THAT(texts, Each(HasSubstr(itself ? "planned" : "'wrong_a'")));
  }
}

// Nor does one replace another that ends communication.
TEST(PassOfTwoEngines, TellsTheFirstOfSeveralErrorsThatRanksFindTogether) {
  for (const bool itself : {false, true}) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf(5), b = leaf(5);
      Engine first(world, NamedTensors{{"a", a}}, {}, SGD{}), second(world, NamedTensors{{"b", b}}, {}, SGD{});
      (a.sum() + b.sum()).backward();
      for (at::Tensor* one : {&a, &b}) {
        if (world.rank() == 1) one->mutable_grad().mul_(2);
      }
      const at::Tensor x = at::ones({5}).requires_grad_(), last = x * 1;
      if (itself) last.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      (last.sum() + a.sum() + b.sum()).backward();
    });
    EXPECT_THAT(texts, Each(HasSubstr(itself ? "planned" : "'a' was left on rank 0 and changed in place on rank 1")));
  }
}

// It takes part in training, wherever it came from: it may be accumulated, differentiated and changed.
TEST_P(PassIn, MayBeginWithAGradientMadeUnderInferenceMode) {
  run_local(2, [](World world) {
    at::Tensor a = leaf(5), nobodys = leaf(5);
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    at::Tensor gradient;
    {
      const c10::InferenceMode inference;
      gradient = at::full({5}, 1.0 + world.rank());
    }
    for (int step = 1; step <= 2; ++step) {
      (a + nobodys).backward(gradient);
      (a * 1).backward(gradient);
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-3.0 * step).all().item<bool>());
    }
    nobodys.mutable_grad().mul_(2);
    EXPECT_TRUE(nobodys.grad().eq(4.0 * (1 + world.rank())).all().item<bool>());
    at::Tensor squared = (nobodys * nobodys + nobodys);
    EXPECT_NO_THROW(torch::autograd::grad({squared}, {nobodys}, {gradient}, true, true)[0].sum().backward());
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, PassIn, testing::Values("ddp", "zero1", "zero2", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

// Contract 3 from the third entrance: raw gradients obey the leaf's dtype rule, in every strategy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <cmath>
#include <optional>

#include "engine/impl.h"
#include "plumb/fused.h"
#include "plumb/nn.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

struct Weights : torch::nn::Module {
  Weights() {
    a = register_parameter("a", torch::zeros({5, 7}, at::kBFloat16));
    b = register_parameter("b", torch::zeros({33}, at::kBFloat16));
  }
  at::Tensor a, b;
};

struct Holder : torch::nn::Module {
  Holder() { weights = register_module("weights", std::make_shared<Weights>()); }
  Unit<Weights> weights{nullptr};
};

using Rule = std::optional<std::optional<at::ScalarType>>;  // outer: unset

class Deliver : public testing::TestWithParam<std::string> {};

TEST_P(Deliver, ObeysTheRuleOfTheLeaf) {
  for (const Rule& rule : {Rule{}, Rule{at::kFloat}, Rule{at::kBFloat16}, Rule{std::optional<at::ScalarType>{}}}) {
    run_local(2, [&](World world) {
      Holder model;
      const at::Tensor a = model.weights->a;
      Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
      auto set = [&](const Rule& one) {
        if (one) a.set_grad_dtype(*one);
      };
      set(rule);                                               // after the engine was built: it follows
      const auto raw = torch::full({5, 7}, 1.0 + 1.0 / 1024);  // a bf16 cannot hold it
      engine.deliver(a, raw);
      engine.deliver(model.weights->b, torch::ones({33}));
      engine.end_pass();
      const at::Tensor whole = engine.full_gradient(a);
      const bool rounded = !rule || (*rule && **rule == at::kBFloat16);
      EXPECT_EQ(whole.scalar_type(), rounded ? at::kBFloat16 : at::kFloat);
      EXPECT_TRUE(whole.to(at::kFloat).eq(rounded ? 1.0F : 1.0F + 1.0F / 1024).all().item<bool>());
      // The neighbour keeps its own: bf16, as its rule has always said.
      EXPECT_EQ(engine.full_gradient(model.weights->b).scalar_type(), at::kBFloat16);
    });
  }
}

TEST_P(Deliver, SumsMicroBatchesInTheAccumulationDtype) {
  for (const int each : {4, 512}) {  // of one pass
    run_local(2, [&](World world) {
      Holder model;
      const at::Tensor b = model.weights->b;
      Options options{.strategy = GetParam()};
      options.accumulate_dtype = at::kFloat;
      Engine engine(world, model, NoOptimizer{}, options);
      for (int i = 1; i <= 512; ++i) {
        engine.deliver(b, torch::ones({33}, at::kBFloat16));
        if (i % each == 0) engine.end_pass();
      }
      EXPECT_TRUE(engine.full_gradient(b).eq(512.0).all().item<bool>()) << each;  // bf16 would stop at 256
    });
  }
}

TEST_P(Deliver, RanksWithDifferentRulesAreAnErrorOnEveryRank) {
  std::vector<std::string> told(2);
  EXPECT_THROW(run_local(2,
                         [&](World world) {
                           Holder model;
                           const at::Tensor a = model.weights->a;
                           Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
                           if (world.rank() == 1) a.set_grad_dtype(at::kFloat);
                           engine.deliver(a, torch::ones({5, 7}));
                           try {
                             engine.end_pass();
                           } catch (const Error& error) {
                             told[world.rank()] = error.what();
                             throw;
                           }
                         }),
               Error);
  EXPECT_THAT(told, testing::Each(testing::HasSubstr("grad_dtype")));
}

TEST_P(Deliver, TakesASparseGradientAsADenseOne) {
  run_local(2, [](World world) {
    at::Tensor a = torch::zeros({4, 2}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{}, {.strategy = GetParam()});
    at::Tensor wanted = torch::zeros({4, 2});
    for (int times = 1; times <= 2; ++times) {
      for (int i = 0; i < times; ++i) {
        const at::Tensor rows = torch::full({1, 1}, world.rank(), at::kLong);
        engine.deliver(a, torch::sparse_coo_tensor(rows, torch::full({1, 2}, 4.0), {4, 2}));
        wanted.narrow(0, 0, 2) += 2;
      }
      engine.end_pass();
      EXPECT_TRUE(engine.full_gradient(a).equal(wanted)) << engine.full_gradient(a);
    }
  });
}

// Not by what lies in its memory.
TEST_P(Deliver, TakesTheNumbersOfANegatedView) {
  run_local(2, [](World world) {
    at::Tensor a = torch::zeros({8}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{}, {.strategy = GetParam()});
    for (const bool assigned : {false, true}) {
      const at::Tensor negated = torch::full({8}, 1.0 + world.rank())._neg_view();
      if (assigned) {
        a.mutable_grad() = negated;
        engine.step();
      } else {
        engine.deliver(a, negated);
        engine.end_pass();
      }
      EXPECT_TRUE(engine.full_gradient(a).eq(-1.5).all().item<bool>()) << assigned << engine.full_gradient(a);
      engine.zero_grad();
    }
  });
}

// What an operation writes itself: in the dtype of the rule where operations can, and rounded to it where they cannot.
TEST_P(Deliver, LetsOperationsWriteByTheRuleOfTheLeafBesideWiderSums) {
  for (const auto& [own, written] : {std::pair(at::kBFloat16, at::kFloat), {at::kDouble, at::kDouble}}) {
    run_local(2, [&](World world) {
      at::Tensor a = torch::zeros({6}, own).requires_grad_();
      a.set_grad_dtype(at::kFloat);
      Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{},
                    {.strategy = GetParam(), .accumulate_dtype = at::kDouble});
      for (const double number : {1 + std::ldexp(1, -12), 1 + std::ldexp(1, -40)}) {
        const auto sink = sink_of(a);
        const GradTarget target = sink->open();
        EXPECT_EQ(target.buffer.scalar_type(), written);
        target.buffer.fill_(number);
        sink->wrote();
        engine.step();
        EXPECT_TRUE(engine.full_gradient(a).eq(static_cast<float>(number)).all().item<bool>()) << number;
        engine.zero_grad();
      }
    });
  }
}

// Frozen when the engine was built.
TEST_P(Deliver, TakesWhatIsOfAParameterThatHasBegunToTrain) {
  for (const bool deterministic : {false, true}) {
    run_local(2, [&](World world) {
      at::Tensor a = torch::zeros({7}).requires_grad_(), b = torch::zeros({5});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                    {.strategy = GetParam(), .deterministic = deterministic, .virtual_ranks = 4});
      for (int step = 1; step <= 2; ++step) {
        b.set_requires_grad(true);
        for (int share = 0; share < 2; ++share) {
          for (int i = 0; i < 2; ++i) engine.deliver(b, torch::full({5}, 1.0 + world.rank()));
          if (share == 1) engine.deliver(a, torch::ones({7}));
          engine.end_pass();
        }
        engine.step();
        engine.zero_grad();
        EXPECT_TRUE(engine.full_parameter(a).eq(-step).all().item<bool>()) << deterministic << engine.full_parameter(a);
        EXPECT_TRUE(engine.full_parameter(b).eq(-6.0 * step).all().item<bool>()) << engine.full_parameter(b);
      }
    });
  }
}

// A gradient that autograd brings and ones that a hook of the same backward hands over are one pass, reduced once.
TEST_P(Deliver, InsideARunningBackwardBelongsToItsPass) {
  run_local(2, [&](World world) {
    Holder model;
    const at::Tensor a = model.weights->a, b = model.weights->b;
    Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
    for (int round = 1; round <= 2; ++round) {
      at::Tensor x = torch::ones({1}).requires_grad_();
      const at::Tensor y = x * 2;
      y.register_hook([&](const at::Tensor&) { engine.deliver(b, torch::full({33}, 2.0 * world.rank())); });
      {
        const Gathered whole = engine.gathered({b});
        (y.sum() * b.to(at::kFloat).sum()).backward();
      }
      EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, round);
      EXPECT_TRUE(engine.full_gradient(b).to(at::kFloat).eq(round * (2.0 + 1.0)).all().item<bool>());
      EXPECT_FALSE(engine.full_gradient(a).defined());
    }
    EXPECT_THROW(engine.end_pass(), Error) << "the pass ended with its backward";
  });
}

TEST_P(Deliver, RefusesFrozenParametersUndefinedGradientsAndOtherShapesAndLosesNothing) {
  run_local(2, [&](World world) {
    Holder model;
    const at::Tensor a = model.weights->a, b = model.weights->b;
    Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
    const auto refused = [&](const at::Tensor& parameter, const at::Tensor& raw, const std::string& word) {
      try {
        engine.deliver(parameter, raw);
        ADD_FAILURE() << "taken, expected: " << word;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(word));
      }
    };
    engine.deliver(b, torch::ones({33}));
    refused(b, {}, "undefined");
    refused(a, torch::ones({7, 5}), "[7, 5]");
    refused(torch::ones({5, 7}), torch::ones({5, 7}), "no parameter of this engine");
    a.set_requires_grad(false);
    refused(a, torch::ones({5, 7}), "frozen");
    a.set_requires_grad(true);
    engine.end_pass();
    EXPECT_TRUE(engine.full_gradient(b).to(at::kFloat).eq(1).all().item<bool>());
    EXPECT_FALSE(engine.full_gradient(a).defined());
  });
}

// As it came: the rule casts nothing.
TEST_P(Deliver, TakesABf16RawGradientUnderTheRuleNone) {
  run_local(2, [&](World world) {
    Holder model;
    const at::Tensor b = model.weights->b;
    b.set_grad_dtype(std::nullopt);
    Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
    engine.deliver(b, torch::full({33}, 3.0, at::kBFloat16));
    engine.end_pass();
    const at::Tensor whole = engine.full_gradient(b);
    if (strategy(GetParam()).gradient != Placement::sharded) {  // a piece is of its bucket's dtype
      EXPECT_EQ(whole.scalar_type(), at::kBFloat16);
    }
    EXPECT_TRUE(whole.to(at::kFloat).eq(3).all().item<bool>());
  });
}

// A neighbour's rule widens their bucket: what this one's own operation wrote is kept in the leaf's dtype, and added to.
TEST_P(Deliver, FusedWritesAddUpBesideAWiderNeighbour) {
  struct Beside : torch::nn::Module {
    Beside() {
      fused = register_module("fused", nn::Linear(nn::LinearOptions{.in = 3, .out = 2, .bias = false}));
      fused->to(at::kBFloat16);
      wide = register_parameter("wide", torch::zeros({5}, at::kBFloat16));
    }
    nn::Linear fused{nullptr};
    at::Tensor wide;
  };
  run_local(2, [&](World world) {
    Beside model;
    Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
    for (int step = 0; step < 3; ++step) {
      if (step == 1) model.wide.set_grad_dtype(at::kFloat);  // after their bucket was laid out for the last time
      double expected = 0;
      for (int micro = 1; micro <= 3; ++micro) {
        const at::Tensor x = torch::full({2, 3}, micro + world.rank(), at::kBFloat16);
        // Whatever memory comes next holds something else.
        for (std::vector<at::Tensor> dirt; dirt.size() < 64;)
          dirt.push_back(torch::full({2, 3}, 1000.0, at::kBFloat16));
        (model.fused->forward(x).sum().to(at::kFloat) + model.wide.to(at::kFloat).sum()).backward();
        expected += 2 * (micro + 0.5);
        EXPECT_TRUE(engine.full_gradient(model.fused->weight).to(at::kFloat).eq(expected).all().item<bool>())
            << step << " " << micro;
        EXPECT_EQ(engine.full_gradient(model.fused->weight).scalar_type(), at::kBFloat16);
        for (const Sink& sink : engine.impl().reducer->sinks()) {
          if (GetParam() == "ddp" && sink.parameter.is_same(model.fused->weight)) {
            EXPECT_EQ(sink.view_is_wider(), step > 0);
          }
        }
        EXPECT_TRUE(engine.full_gradient(model.wide).to(at::kFloat).eq(micro).all().item<bool>());
      }
      engine.step();
      engine.zero_grad();
    }
  });
}

TEST(DeliverAlone, KeepsTheDtypeOfAGradientUnderTheRuleNone) {
  run_local(2, [](World world) {
    at::Tensor wide = at::zeros({6}).requires_grad_();
    wide.set_grad_dtype(std::nullopt);
    Engine engine(world, NamedTensors{{"wide", wide}}, {}, SGD{.lr = 1});
    for (int step = 1; step <= 2; ++step) {
      engine.deliver(wide, at::full({6}, 2.0, at::kBFloat16));
      engine.end_pass();
      EXPECT_EQ(wide.grad().scalar_type(), at::kBFloat16);
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(wide.detach().eq(-2.0 * step).all().item<bool>()) << wide;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, Deliver, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

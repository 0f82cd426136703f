// Steps that are refused, and calls out of order: every rank is told alike, nothing is changed, and what follows is right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "engine/refill.h"
#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

class RefusalIn : public testing::TestWithParam<std::string> {};

// What is not finite lies in one rank's part alone where gradients are sharded, and every rank names it.
TEST_P(RefusalIn, AGradientThatIsNotFiniteIsNamedOnEveryRankAndTheStepCanBeTakenAgain) {
  for (const int poisoned : {0, 1, 3, 4, 7}) {
    std::string name;
    const auto texts = errors(3, [&](World world) {
      Parts model(3);
      const auto parameters = model.parameters();
      Engine engine(world, model, SGD{.lr = 0.5}, {.strategy = GetParam(), .nonfinite = NonFinite::error});
      const auto gradients = [&](bool good) {
        std::vector<at::Tensor> all;
        for (size_t i = 0; i < parameters.size(); ++i) {
          all.push_back(at::full(parameters[i].sizes(), 0.25 * (world.rank() + 1), at::kDouble));
          if (!good && static_cast<int>(i) == poisoned && world.rank() == 2) all.back().view(-1)[-1] = NAN;
        }
        return all;
      };
      if (world.rank() == 0) name = model.named_parameters().keys()[poisoned];
      std::vector<at::Tensor> before;
      for (const at::Tensor& p : parameters) before.push_back(engine.full_parameter(p));
      std::string said;
      engine.backward(model.loss(gradients(false)));
      try {
        engine.step();
      } catch (const Error& error) {
        said = error.what();
      }
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(engine.full_parameter(parameters[i]).equal(before[i])) << i;
      engine.zero_grad();
      engine.backward(model.loss(gradients(true)));
      engine.step();
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(at::allclose(engine.full_parameter(parameters[i]), before[i] - 0.25)) << i;
      if (!said.empty()) throw Error(said);
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("the gradient of '" + name + "' is not finite"), Not(HasSubstr(", '")))));
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, RefusalIn, testing::Values("ddp", "zero1", "zero2", "zero3"),
                         [](const auto& info) { return info.param; });

// Its gradients were held, so that they lie as they did at first; the next ones come in another order, when the optimizer's state
// has its places already. So it has where it was asked for before the first step.
TEST(Refusal, OfTheFirstStepLeavesEveryParameterItsOwnState) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const auto& [dtype, asked] : {std::pair(at::kFloat, false), {at::kBFloat16, false}, {at::kFloat, true}}) {
      run_local(2, [&](World world) {
        NamedTensors parameters;
        for (const int64_t size : {3, 10, 5, 40, 7}) {
          parameters.emplace_back(c10::str("p", size), at::zeros({size}, dtype).requires_grad_());
        }
        Engine engine(world, parameters, {}, SGD{.lr = 1, .momentum = 0.5},
                      {.strategy = strategy, .nonfinite = NonFinite::error, .hold_unsharded = true});
        const auto run = [&](double gradient) {
          at::Tensor loss = at::zeros({});
          for (size_t i = parameters.size(); i-- > 0;) {
            const double own = gradient * static_cast<double>(i + 1);
            loss = loss + parameters[i].second.to(at::kFloat).sum() * own;
          }
          loss.backward();
        };
        if (asked) {
          all_slots(engine.impl());
        } else {
          {
            const auto quiet = engine.no_sync();
            run(NAN);
          }
          EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<Error>(HasSubstr("is not finite")));
        }
        for (int step = 0; step < 2; ++step) {
          engine.zero_grad();
          run(1 + 2 * world.rank());
          engine.step();
        }
        for (size_t i = 0; i < parameters.size(); ++i) {
          const double wanted = -(2.0 + 3.0) * static_cast<double>(i + 1);
          EXPECT_TRUE(engine.full_parameter(parameters[i].second).eq(wanted).all().item<bool>()) << strategy << i;
        }
      });
    }
  }
}

TEST(Refusal, AStepWithinAStepIsNamedAndTheFirstGoesOn) {
  at::Tensor weight = at::zeros({3}).requires_grad_();
  Engine engine(World(), NamedTensors{{"w", weight}}, {}, UserOptimizer{});
  weight.sum().backward();
  engine.begin_step();
  EXPECT_THAT([&] { engine.begin_step(); }, ThrowsMessage<Error>(HasSubstr("a step is under way already")));
  for (Piece& piece : engine.pieces()) piece.weight.sub_(piece.gradient);
  engine.end_step();
  EXPECT_TRUE(weight.equal(at::full({3}, -1.0)));
}

TEST(Refusal, AnotherOptimizersSettingsThatDifferAreNamed) {
  const auto texts = errors(2, [](World world) {
    at::Tensor weight = at::zeros({3}).requires_grad_();
    Engine engine(world, NamedTensors{{"w", weight}}, {}, NoOptimizer{});
    engine.impl().user_settings = {{"the nesterov of group 0", world.rank() == 1 ? 1.0 : 0.0}};
    weight.sum().backward();
    engine.step();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("the nesterov of group 0 is 1 on rank 1"), HasSubstr("0 on rank 0"))));
}

TEST(Refusal, AGraphThatWasNotKeptIsGoneAfterItsBackward) {
  at::Tensor weight = at::ones({3}).requires_grad_();
  Engine engine(World(), NamedTensors{{"w", weight}}, {}, SGD{.lr = 1});
  const at::Tensor loss = weight.pow(2).sum();
  engine.backward(loss, /*retain_graph=*/true);
  engine.backward(loss);
  EXPECT_TRUE(weight.grad().equal(at::full({3}, 4.0)));
  EXPECT_ANY_THROW(engine.backward(loss));
}

// A sum over so many things on each rank is divided by all of them.
TEST(Refusal, WeightsThatAreSetAsideWithTheirGradientsAreForgotten) {
  run_local(2, [](World world) {
    at::Tensor weight = at::zeros({3}).requires_grad_();
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1});
    double expected = 0;
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        engine.backward(weight.sum() * 100, false, 50.0);
        engine.zero_grad();
      }
      engine.backward(weight.sum() * 3 * (world.rank() + 1), false, 3.0 * (world.rank() + 1));
      engine.backward(weight.sum() * 8, false, world.rank() == 0 ? 2.0 : 0.0);
      // (3 + 6 + 16) things' worth of gradient over (3 + 6 + 2) things.
      expected -= 25.0 / 11.0;
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(at::allclose(weight.detach(), at::full({3}, expected))) << "step " << step << weight;
    }
  });
}

TEST(Refusal, OfAParameterThatHasAnEngineNamesItAndTheRank) {
  const auto texts = test::errors(3, [](World world) {
    at::Tensor mine = at::zeros({2}).requires_grad_(), shared = at::zeros({2}).requires_grad_();
    Engine one(world, NamedTensors{{"a", shared}}, {});
    Engine two(world, NamedTensors{{"mine", mine}, {"b", shared}}, {});
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(texts[rank], HasSubstr(c10::str("rank ", rank, ": parameter 'b' belongs to another engine already")));
  }
}

// Nobody waits for the rank that left, and nobody takes its sum for whole.
TEST(Refusal, OfAPassThatOneRankLeftByAnExceptionReachesAll) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = at::zeros({8}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    const auto run = [&](bool leaves) {
      const auto pass = engine.pass();
      a.sum().backward();
      if (leaves) throw std::logic_error("enough");
      a.sum().backward();
    };
    EXPECT_THAT([&] { run(world.rank() == 1); },
                ThrowsMessage<std::exception>(HasSubstr(world.rank() == 1 ? "enough" : "failed on rank 1")));
    engine.zero_grad();
    run(false);
    engine.step();
    EXPECT_TRUE(a.detach().eq(-2).all().item<bool>());
  });
  EXPECT_THAT(texts, Each("none"));
}

// What came before the hook is gone, as in one process, or refused where it cannot be taken back.
TEST(Refusal, OfZeroGradInsideABackwardIsWhereGradientsAreCollected) {
  for (const std::string how : {"ddp", "zero1", "zero2", "zero3", "deterministic"}) {
    const bool collects = how != "ddp" && how != "zero1";
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = at::zeros({40}, at::kDouble).requires_grad_(), b = at::zeros({40}, at::kDouble).requires_grad_();
      Options options{.strategy = how == "deterministic" ? "ddp" : how, .bucket_bytes = 64, .first_bucket_bytes = 64};
      options.deterministic = how == "deterministic";
      options.virtual_ranks = 2;
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, options);
      const auto backward = [&](bool clears) {
        const at::Tensor h = b * 1;
        h.register_hook([&engine, clears](const at::Tensor& gradient) {
          if (clears) engine.zero_grad();
          return gradient;
        });
        (h.sum() + 3 * a.sum()).backward();  // a's comes first
      };
      if (!collects) {
        backward(true);
        EXPECT_FALSE(engine.full_gradient(a).defined());
        EXPECT_TRUE(engine.full_gradient(b).eq(1).all().item<bool>());
        engine.step();
        EXPECT_TRUE(engine.full_parameter(a).eq(0).all().item<bool>());
        return;
      }
      EXPECT_THAT([&] { backward(true); }, ThrowsMessage<std::exception>(HasSubstr("zero_grad() inside a backward")));
      if (options.deterministic) return;  // this step has had its shares
      engine.zero_grad();
      backward(false);
      engine.step();
      EXPECT_TRUE(engine.full_parameter(a).eq(-3).all().item<bool>());
    });
    EXPECT_THAT(texts, Each("none")) << how;
  }
}

}  // namespace
}  // namespace plumb

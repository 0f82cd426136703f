// Backwards that nobody announced, since other code than ours began them, and backwards of several engines: each is one pass that ends
// when it does, well or badly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdlib>

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

// Past the engine that announces: libtorch's own runs it.
void backward_of_somebody_else(const at::Tensor& loss) {
  torch::autograd::Engine::get_base_engine().execute({torch::autograd::impl::gradient_edge(loss)},
                                                     {at::ones_like(loss)}, /*keep_graph=*/false,
                                                     /*create_graph=*/false, /*accumulate_grad=*/true);
}

class UnannouncedIn : public testing::TestWithParam<std::string> {};

TEST_P(UnannouncedIn, ABackwardIsOnePassWithWhatRunsInside) {
  run_local(2, [](World world) {
    at::Tensor a = leaf(5), b = leaf(40);
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    const double mine = world.rank() + 1.0;
    const scenarios::Checkpoint::Body body = [&](const at::Tensor& x) { return x * b.sum() * mine; };
    for (int step = 1; step <= 3; ++step) {
      for (int pass = 1; pass <= 2; ++pass) {
        const at::Tensor x = at::ones({}).requires_grad_();
        // Each checkpoint is a backward of its own inside of this one, and brings a gradient of b.
        at::Tensor y = scenarios::checkpoint(body, x) + scenarios::checkpoint(body, x * 2) + a.sum() * mine;
        if (step == 2) {
          engine.backward(y);
        } else {
          backward_of_somebody_else(y);
        }
        EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, pass) << step;
        EXPECT_TRUE(engine.full_gradient(a).eq(1.5 * pass).all().item<bool>()) << step;
        EXPECT_TRUE(engine.full_gradient(b).eq(4.5 * pass).all().item<bool>()) << step;
      }
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-3.0 * step).all().item<bool>());
      EXPECT_TRUE(engine.full_parameter(b).eq(-9.0 * step).all().item<bool>());
    }
  });
}

TEST_P(UnannouncedIn, ABackwardThatFailsIsToldToEverybodyAndCanBeRunAgain) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = leaf(5), b = leaf(40);
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    for (int step = 1; step <= 2; ++step) {
      at::Tensor y = a * 2;
      if (world.rank() == 1) {
        y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      }
      std::string said = "nothing";
      try {
        backward_of_somebody_else(y.sum() + b.sum());
      } catch (const std::exception& error) {
        said = error.what();
      }
      EXPECT_THAT(said, HasSubstr(world.rank() == 1 ? "planned" : "failed on rank 1"));
      engine.zero_grad();
      backward_of_somebody_else((a * 2).sum() + b.sum());
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-2.0 * step).all().item<bool>());
      EXPECT_TRUE(engine.full_parameter(b).eq(-1.0 * step).all().item<bool>());
    }
  });
  EXPECT_THAT(texts, Each("none"));
}

// The first backward of a process, whose task has the number 0: in a process of its own.
TEST(UnannouncedDeathTest, TheVeryFirstBackwardIsOnePassToo) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto first = [] {
    at::Tensor a = leaf(5), b = leaf(4);
    Engine engine(World(), NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1});
    const scenarios::Checkpoint::Body body = [&](const at::Tensor& x) { return x * b.sum(); };
    const at::Tensor x = at::ones({}).requires_grad_();
    backward_of_somebody_else(scenarios::checkpoint(body, x) + scenarios::checkpoint(body, x) + a.sum());
    const int64_t passes = engine.impl().reducer->here(Where::Kind::backward).pass;
    const bool right = a.grad().eq(1).all().item<bool>() && b.grad().eq(2).all().item<bool>();
    std::_Exit(passes == 1 && right ? 0 : 1);
  };
  EXPECT_EXIT(first(), testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(Strategies, UnannouncedIn, testing::Values("ddp", "zero2"),
                         [](const auto& info) { return info.param; });

struct Tired final : c10d::CommHookInterface {
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket&) override { throw std::runtime_error("tired"); }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }
};

// Whichever of them it is.
TEST(SeveralEngines, EndTheirPassesAlsoWhereOneOfThemFails) {
  for (const int tired : {0, 1, 2}) {
    const auto texts = errors(2, [&](World world) {
      std::vector<at::Tensor> leaves;
      std::vector<std::unique_ptr<Engine>> engines;
      at::Tensor loss = at::zeros({});
      for (int i = 0; i < 3; ++i) {
        leaves.push_back(leaf(4));
        engines.push_back(std::make_unique<Engine>(world, NamedTensors{{"a" + std::to_string(i), leaves.back()}},
                                                   NamedTensors{}, SGD{.lr = 1}));
        loss = loss + leaves.back().sum() * (world.rank() + 1);
      }
      engines[static_cast<size_t>(tired)]->impl().reducer->use_hook(std::make_unique<Tired>());
      EXPECT_THAT([&] { loss.backward(); }, testing::ThrowsMessage<std::exception>(HasSubstr("tired")));
      for (int i = 0; i < 3; ++i) {
        if (i == tired) continue;
        EXPECT_TRUE(leaves[static_cast<size_t>(i)].grad().eq(1.5).all().item<bool>()) << i << " beside " << tired;
        engines[static_cast<size_t>(i)]->step();
        EXPECT_TRUE(leaves[static_cast<size_t>(i)].detach().eq(-1.5).all().item<bool>());
      }
    });
    EXPECT_THAT(texts, Each("none"));
  }
}

}  // namespace
}  // namespace plumb

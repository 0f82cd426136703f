// Ranks that ask before they gather: how often, and that whoever left the common way is heard.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "save/support/folder.h"
#include "unit/support/chain.h"
#include "watch/wire.h"

namespace plumb {
namespace {

using namespace test;

constexpr int64_t kEverything = 1 << 20;  // bytes of a window that holds all units

struct Asked {
  int64_t pass = 0, gathers = 0;  // host messages, and units
};

// What rank 0 does in a pass of the steady state through so many units.
Asked asked(int ranks, int units, int64_t window) {
  Asked result;
  run_local(ranks, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    Alike net(units);
    lock.unlock();
    world.impl().control->has_links = false;
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    engine.impl().units->gather_together(window);
    ASSERT_TRUE(engine.impl().units->asks());
    for (int step = 0; step < 3; ++step) {
      const auto waits = [&] { return wire_counts(world)[static_cast<size_t>(Cargo::control)].waits; };
      const int64_t before = waits(), gathered = engine.impl().units->gathers();
      at::Tensor h = ones;
      for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
      h.sum().backward();
      if (world.rank() == 0) result = {waits() - before, engine.impl().units->gathers() - gathered};
      engine.step();
      engine.zero_grad();
    }
  });
  return result;
}

// Questions are by the window: of a pass whose units fit into one, as many as of any other.
TEST(Asking, IsByTheWindow) {
  for (const int ranks : {2, 3}) {
    const Asked few = asked(ranks, 3, kEverything), many = asked(ranks, 24, kEverything);
    EXPECT_EQ(few.gathers, 3);
    EXPECT_EQ(many.gathers, 24);
    EXPECT_EQ(few.pass, 3) << "the window, that nobody wants more, and the facts";
    EXPECT_EQ(many.pass, few.pass);
    const Asked narrow = asked(ranks, 24, kNextAlone);
    EXPECT_EQ(narrow.gathers, 2 * 24 - 1);
    EXPECT_LE(narrow.pass, narrow.gathers + 2);
  }
}

// A rank that uses less of a window than the others has more of it left: nobody goes by that where all must meet.
TEST(Asking, RanksThatLeftAWindowDifferentlyMeetInTheNextCall) {
  on_ranks(
      3, Gather::asking,
      [](World world, Chain& net, Engine& engine) {
        for (int step = 0; step < 4; ++step) {
          net.forward(ones).sum().backward();
          engine.step();
          engine.zero_grad();
          {
            at::NoGradGuard no_grad;
            for (int i = 0; i < 5 - (step % 2 == 0 ? world.rank() : 0); ++i) net.layers[i]->forward(ones);
          }
          for (auto& layer : net.layers) {
            const at::Tensor whole = engine.full_parameter(layer.get()->weight);
            const auto scope = engine.gathered({layer.get()->weight});
            EXPECT_TRUE(whole.equal(layer.get()->weight)) << step;
            EXPECT_TRUE(whole.isfinite().all().item<bool>());
          }
        }
      },
      kEverything);
}

// Ranks that gather different units begin no reduction by themselves up to the end of that backward; where all go the same way,
// before and after it, reductions overlap with it.
TEST(Asking, RanksThatPartedLetReductionsWaitForTheEndOfThatBackwardAlone) {
  for (const int ranks : {2, 3}) {
    on_ranks(ranks, Gather::asking, [&](World world, Chain& net, Engine& engine) {
      // Reductions that have begun when the backward has come to the first layer.
      const auto begun = [&](bool part) {
        int64_t seen = -1;
        at::Tensor h = ones;
        for (int i = 0; i < 5; ++i) {
          if (part && i == 2 && world.rank() == 0) continue;
          h = torch::tanh(net.layers[i]->forward(h));
          if (i == 0) {
            h.register_hook([&](const at::Tensor& gradient) {
              seen = engine.impl().reducer->progress().launched;
              return gradient;
            });
          }
        }
        h.sum().backward();
        engine.step();
        engine.zero_grad();
        return seen;
      };
      for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 2; ++i) (void)begun(false);  // the way of the last backward is what is expected
        EXPECT_GE(begun(false), 3) << "round " << round;
        // Rank 0 has less to do, and ends first. Those who still gather then follow it in all of them.
        EXPECT_THAT(begun(true), testing::AnyOf(0, world.rank() == 0 ? 0 : 5)) << "round " << round;
      }
    });
  }
}

// Whoever needs no unit more, for an evaluation or autograd::grad that had less to do here, serves the others in every call
// that all ranks make between backwards.
TEST(Asking, RanksThatUsedFewerUnitsServeTheOthersInWhateverComesNext) {
  const Scratch folder;
  on_ranks(3, Gather::asking, [&](World world, Chain& net, Engine& engine) {
    at::NoGradGuard no_grad;
    const at::Tensor& weight = net.layers[2].get()->weight;
    const auto one_alone = [&](int rank) {
      if (world.rank() == rank) net.forward(ones);
    };
    const auto backward = [&] {
      const at::AutoGradMode grad(true);
      net.forward(ones).sum().backward();
    };
    backward();
    const double norm = weight.grad().norm().item<double>();
    EXPECT_GT(norm, 0);
    for (const int rank : {0, 2}) {
      one_alone(rank);
      EXPECT_EQ(weight.grad().norm().item<double>(), norm);
      one_alone(rank);
      EXPECT_TRUE(torch::isfinite(engine.grad_norm()).item<bool>());
      one_alone(rank);
      EXPECT_NEAR(engine.full_gradient(weight).norm().item<double>(), norm, 1e-6);
    }
    engine.step();
    engine.zero_grad();
    std::string path;
    for (const int rank : {0, 2}) {
      one_alone(rank);
      {
        const auto scope = engine.gathered({weight}, Access::write);
        if (world.rank() == 0) weight.fill_(0.5);
      }
      one_alone(rank);
      path = engine.save(folder.path("run"));
      one_alone(rank);
      engine.load(path);
    }
    backward();
    engine.step();
    EXPECT_TRUE(engine.full_parameter(weight).isfinite().all().item<bool>());
  });
}

}  // namespace
}  // namespace plumb

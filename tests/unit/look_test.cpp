// What can be looked at while and after units are used: a graph that recomputes, and where a rank is on its road.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include "libtorch.h"

#include "engine/impl.h"
#include "plumb/checkpoint.h"
#include "plumb/plumb.h"
#include "unit/saved.h"
#include "unit/support/net.h"
#include "watch/road.h"

namespace plumb {
namespace {

using namespace test;

// As a debugger or a printer of graphs does: each look runs the function again, and a backward afterwards is right.
TEST(Look, AtAGraphThatRecomputesNeedsNoBackward) {
  int runs = 0;
  const at::Tensor x = torch::full({3}, 2.0).requires_grad_();
  const at::Tensor y = checkpoint(
      [&runs](const at::Tensor& in) {
        ++runs;
        return (in * 3).pow(2);
      },
      x);
  const auto* node = dynamic_cast<torch::autograd::generated::PowBackward0*>(y.grad_fn().get());
  ASSERT_NE(node, nullptr);
  for (int look = 1; look <= 2; ++look) {
    EXPECT_TRUE(node->self_.unpack(y.grad_fn()).eq(6).all().item<bool>());
    EXPECT_EQ(runs, 1 + look);
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().eq(2 * 6 * 3).all().item<bool>());
  EXPECT_EQ(runs, 4);
}

struct Watched : torch::nn::Module {
  explicit Watched(int64_t length) { weight = register_parameter("weight", torch::ones({length, length})); }
  at::Tensor forward(const at::Tensor& x) {
    if (road != nullptr) seen = road->last();
    return x.mm(weight);
  }
  at::Tensor weight;
  Road* road = nullptr;
  Passed seen;
};

// The last thing that is told of a rank that dies inside a unit: that it gathered this unit's bucket, and when.
// Somebody else's hooks may keep the very tensor.
TEST(Look, AtAParameterThatOthersHooksKeepFindsItWhole) {
  struct Keeps final : torch::autograd::SavedVariableHooks {
    void call_pack_hook(const at::Tensor& tensor) override { kept = tensor.detach(); }
    at::Tensor call_unpack_hook() override { return kept; }
    at::Tensor kept;
  };
  on_two([](World world, Net& net, Engine& engine) {
    const at::Tensor& weight = net.first->up->weight;
    saved::Hooks hooks;
    {
      const Gathered scope = engine.gathered({weight});
      hooks = saved::make_plainly(std::make_unique<Keeps>());
      hooks->call_pack_hook(weight);
    }
    EXPECT_EQ(gathered(engine), 0);
    const at::Tensor found = hooks->call_unpack_hook().clone();
    EXPECT_TRUE(found.equal(engine.full_parameter(weight)));
    world.barrier();
  });
}

TEST(Look, AtTheRoadShowsWhichUnitWasGathered) {
  run_local(2, [](World world) {
    struct Three : torch::nn::Module {
      Three() {
        for (int i = 0; i < 3; ++i) {
          units.push_back(register_module("unit" + std::to_string(i), std::make_shared<Watched>(4)));
        }
      }
      std::vector<Unit<Watched>> units;
    };
    Three net;
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3", .gather_ahead_bytes = 0});
    for (auto& unit : net.units) unit->road = &road_of(world);
    for (int64_t step = 0; step < 2; ++step) {
      at::Tensor h = torch::ones({2, 4});
      for (auto& unit : net.units) h = unit->forward(h);
      h.sum().backward();
      engine.step();
      engine.zero_grad();
      for (auto& unit : net.units) {
        int64_t bucket = -1;
        for (const Sink& sink : engine.impl().reducer->sinks()) {
          if (sink.parameter.is_same(unit->weight)) bucket = sink.slot.bucket;
        }
        EXPECT_EQ(unit->seen.point, Point::gather);
        EXPECT_EQ(unit->seen.index, bucket);
        EXPECT_EQ(unit->seen.step, step);
      }
    }
  });
}

}  // namespace
}  // namespace plumb

// Contract 1, one test for each way an old gradient can exist when buckets are rebuilt.
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "scenarios/support/stage.h"

namespace plumb {
namespace {

// Two parameters that lie in one bucket in one order before the rebuild and in the other after it.
struct Two : torch::nn::Module {
  Two() {
    a = register_parameter("a", torch::ones({5}));
    b = register_parameter("b", torch::full({3}, 2.0));
  }
  at::Tensor loss(double scale) { return (a.pow(2) * scale).sum() + (b * b.detach()).sum() * scale; }
  at::Tensor a, b;
};

// `before` makes the old gradient, on every rank alike; then one backward triggers the rebuild, and one more follows.
// Everything must be as in one process that never rebuilds.
void survives(const std::function<void(Two&, Engine*)>& before) {
  for (int ranks : {1, 2, 3}) {
    auto run = [&](Two& model, Engine* engine) {
      before(model, engine);
      model.loss(1).backward();
      model.loss(2).backward();
    };
    Two expected;
    run(expected, nullptr);
    run_local(ranks, [&](World world) {
      Two model;
      Engine engine(world, model, SGD{.lr = 0.0});
      const at::Tensor old_home = engine.impl().reducer->buckets()[0].gradient;
      run(model, &engine);
      ASSERT_FALSE(engine.impl().reducer->buckets()[0].gradient.is_same(old_home)) << "the buckets were not rebuilt";
      EXPECT_TRUE(at::allclose(model.a.grad(), expected.a.grad())) << ranks << " ranks: " << model.a.grad();
      EXPECT_TRUE(at::allclose(model.b.grad(), expected.b.grad())) << ranks << " ranks: " << model.b.grad();
      engine.step();
      model.zero_grad();  // a gradient with a graph and its parameter hold each other
    });
    expected.zero_grad();
  }
}

TEST(Rebuild, KeepsNothingWhereThereIsNothing) {
  survives([](Two&, Engine*) {});
}
TEST(Rebuild, KeepsTheGradientOfHeldBackwards) {
  survives([](Two& model, Engine* engine) {
    std::unique_ptr<NoSync> guard;
    if (engine != nullptr) guard = std::make_unique<NoSync>(*engine);
    model.loss(3).backward();
  });
}
TEST(Rebuild, KeepsAnAssignedGradientOfOtherMemory) {
  survives([](Two& model, Engine*) { model.a.mutable_grad() = at::full({5}, 7.0); });
}
TEST(Rebuild, KeepsAnAssignedGradientOfOtherStrides) {
  survives([](Two& model, Engine*) { model.b.mutable_grad() = at::arange(6.0).slice(0, 0, 6, 2); });
}
TEST(Rebuild, KeepsAScaledGradient) {
  survives([](Two& model, Engine* engine) {
    std::unique_ptr<NoSync> guard;
    if (engine != nullptr) guard = std::make_unique<NoSync>(*engine);
    model.loss(3).backward();
    model.a.mutable_grad().mul_(0.5);
  });
}
TEST(Rebuild, KeepsTheGradientOfAParameterThatTheBackwardDoesNotReach) {
  for (int ranks : {1, 2}) {
    run_local(ranks, [&](World world) {
      Two model;
      Engine engine(world, model, SGD{.lr = 0.0});
      model.b.mutable_grad() = at::full({3}, 4.0);
      model.a.sum().backward();
      EXPECT_TRUE(at::allclose(model.b.grad(), at::full({3}, 4.0)));
      EXPECT_TRUE(at::allclose(model.a.grad(), at::ones({5})));
      engine.step();
    });
  }
}
TEST(Rebuild, KeepsAGradientThatHasAGraph) {
  survives([](Two& model, Engine*) { model.loss(1).backward({}, false, true); });
}
TEST(Rebuild, KeepsAClearedGradientCleared) {
  run_local(2, [&](World world) {
    Two model;
    Engine engine(world, model, SGD{.lr = 0.0});
    model.loss(5).backward();
    model.a.mutable_grad().reset();
    model.b.sum().backward();
    EXPECT_FALSE(model.a.grad().defined()) << "a gradient came back from the dead";
    EXPECT_TRUE(at::allclose(model.b.grad(), at::full({3}, 11.0)));
  });
}
TEST(Rebuild, FollowsRankZerosOrderEverywhere) {
  std::vector<std::vector<std::string>> orders(3);
  run_local(3, [&](World world) {
    Two model;
    Engine engine(world, model, SGD{.lr = 0.0});
    if (world.rank() == 0) {
      const at::Tensor early = model.b.sum(), late = model.a.sum();  // the later node goes back first
      (early + late).backward();
    } else {
      model.b.sum().backward();
    }
    for (const auto& bucket : engine.impl().reducer->buckets()) {
      for (const Sink* sink : bucket.sinks) orders[world.rank()].push_back(sink->name);
    }
  });
  for (const auto& order : orders) EXPECT_EQ(order, (std::vector<std::string>{"a", "b"}));
}

}  // namespace
}  // namespace plumb

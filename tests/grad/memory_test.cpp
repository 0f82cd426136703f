// The memory of reduced gradients goes with them, and what comes back holds nothing old.
#include <gtest/gtest.h>
#include "libtorch.h"

#include <functional>
#include <limits>
#include <mutex>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

struct Wide : torch::nn::Module {
  Wide() {
    // Lengths that leave gaps in their bucket.
    for (int i = 0; i < 3; ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::randn({331, 333}) / 20));
    }
    small = register_parameter("small", torch::randn({5}, at::kDouble));  // in another bucket
  }
  at::Tensor loss(int rank) {
    at::Tensor x = torch::full({2, 331}, 0.1 * (rank + 1));
    for (const auto& w : weights) x = torch::tanh(x.mm(w)).narrow(1, 0, 331);
    return x.sum() + small.square().sum().to(at::kFloat) * (rank + 1);
  }
  std::vector<at::Tensor> weights;
  at::Tensor small;
};

class GradientMemory : public testing::TestWithParam<std::string> {};

TEST_P(GradientMemory, GoesWithTheGradientsAndComesBackClean) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(3);
    Wide net, twin;
    {
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < 3; ++i) twin.weights[i].copy_(net.weights[i]);
      twin.small.copy_(net.small);
    }
    lock.unlock();
    const Options options{.strategy = GetParam(), .clip_norm = 0.5};
    Engine engine(world, net, SGD{.lr = 0.1, .momentum = 0.9}, options);
    Engine keeps(world, twin, SGD{.lr = 0.1, .momentum = 0.9}, options);
    engine.impl().reducer->layout().small = 1000;
    keeps.impl().reducer->layout().small = std::numeric_limits<int64_t>::max();
    for (int step = 0; step < 4; ++step) {
      net.loss(world.rank()).backward();
      twin.loss(world.rank()).backward();
      const at::Tensor kept = net.weights[0].grad();
      const StepInfo info = engine.step(), same = keeps.step();
      EXPECT_TRUE(info.grad_norm.equal(same.grad_norm)) << info.grad_norm << " and " << same.grad_norm;
      const at::Tensor before = kept.detach().clone();  // clipped
      engine.zero_grad();
      keeps.zero_grad();
      for (const Bucket& bucket : engine.impl().reducer->buckets()) {
        const bool small = bucket.dtype == at::kDouble;
        EXPECT_EQ(bucket.gradient.defined(), small);
      }
      EXPECT_TRUE(kept.equal(before)) << "somebody keeps it";
      // Whatever the memory holds by then.
      for (const Bucket& bucket : engine.impl().reducer->buckets()) {
        at::full({bucket.kept.size()}, std::numeric_limits<float>::quiet_NaN());
      }
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(net.weights[i].equal(twin.weights[i])) << i;
  });
}

// Gradients that nobody keeps are written where the last ones were: no step copies them elsewhere.
TEST_P(GradientMemory, StaysWhereItIsWhileNobodyKeepsIt) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Wide net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = GetParam()});
    engine.impl().reducer->layout().small = std::numeric_limits<int64_t>::max();
    std::vector<const void*> before;
    for (int step = 0; step < 5; ++step) {
      for (int micro = 0; micro < 2; ++micro) net.loss(world.rank()).backward();
      engine.step();
      engine.zero_grad();
      std::vector<const void*> now;
      for (const Bucket& bucket : engine.impl().reducer->buckets()) now.push_back(bucket.gradient.const_data_ptr());
      if (step > 1) {
        EXPECT_EQ(now, before) << step;  // by then buckets lie in the order of readiness
      }
      before = now;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, GradientMemory, testing::Values("ddp", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

// The tensor itself, or another one over its memory: who keeps it has what was there.
TEST(KeptGradients, AreNotWrittenAgain) {
  using Keep = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<Keep> ways = {[](const at::Tensor& gradient) { return gradient; },
                                  [](const at::Tensor& gradient) { return gradient.detach(); },
                                  [](const at::Tensor& gradient) { return gradient.detach().narrow(0, 2, 3); }};
  for (size_t way = 0; way < ways.size(); ++way) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({8}).requires_grad_(), b = at::zeros({8}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{});
      for (const double factor : {1.0, 2.0, 3.0}) {
        (a.sum() * factor + b.sum()).backward();
        const at::Tensor kept = ways[way](a.grad());
        engine.zero_grad();
        (a.sum() * 7 + b.sum()).backward();
        EXPECT_TRUE(kept.eq(factor).all().item<bool>()) << way << ", " << factor;
        EXPECT_TRUE(a.grad().eq(7).all().item<bool>()) << way << ", " << factor;
        engine.zero_grad();
      }
    });
  }
}

// Nor by a step that finds another gradient in its place.
TEST(KeptGradients, AreNotWrittenByAStep) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({40}).requires_grad_(), b = at::zeros({8}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                    {.strategy = strategy, .clip_norm = 1e6});
      for (int step = 1; step <= 3; ++step) {
        (a.sum() + b.sum()).backward();
        const at::Tensor kept = a.grad();
        a.mutable_grad() = at::full({40}, 6.0 * world.rank());
        engine.step();
        EXPECT_TRUE(kept.eq(1).all().item<bool>()) << strategy << ", step " << step;
        EXPECT_TRUE(engine.full_gradient(a).eq(3).all().item<bool>()) << strategy << ", step " << step;
        EXPECT_TRUE(engine.full_parameter(a).eq(-3 * step).all().item<bool>()) << strategy << ", step " << step;
        EXPECT_TRUE(engine.full_parameter(b).eq(-step).all().item<bool>()) << strategy << ", step " << step;
        engine.zero_grad();
      }
    });
  }
}

}  // namespace
}  // namespace plumb

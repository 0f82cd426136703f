// Units that are used where nobody can tell for how long, looked at without a backward, or used by replicas in orders of their own.
#include <ATen/SavedTensorHooks.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "plumb/checkpoint.h"
#include "unit/support/net.h"

namespace plumb {
namespace {

using namespace test;
using scenarios::Alike;

at::Tensor through(Alike& net, at::Tensor h, const std::vector<int>& order) {
  for (const int i : order) h = torch::tanh(net.layers[static_cast<size_t>(i)]->forward(h));
  return h;
}

struct Trained {
  explicit Trained(const World& world, const Options& options, int layers = 3) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    net = std::make_unique<Alike>(layers);
    torch::manual_seed(7);
    twin = std::make_unique<Alike>(layers);
    lock.unlock();
    engine = std::make_unique<Engine>(world, *net, SGD{.lr = 0.1}, options);
  }
  int64_t gathered() const { return engine->impl().units->gathered_bytes(); }
  void expect_twins() const {
    const auto mine = net->parameters(), wanted = twin->parameters();
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(engine->full_parameter(mine[i]).allclose(wanted[i].detach(), 1e-4, 1e-6)) << i;
    }
  }
  std::unique_ptr<Alike> net, twin;
  std::unique_ptr<Engine> engine;
};

// Where hooks of saved tensors are switched off, as transforms do it, a unit stays until a step comes: nobody tells when it is
// read.
TEST(Lingering, AreUnitsThatWereSavedPastTheHooks) {
  run_local(2, [](World world) {
    Trained one(world, {.strategy = "zero3"});
    torch::optim::SGD optimizer(one.twin->parameters(), 0.1);
    const at::Tensor x = torch::ones({2, 6});
    for (int step = 0; step < 3; ++step) {
      at::Tensor y;
      at::SavedTensorDefaultHooks::disable("a test");
      y = through(*one.net, x, {0, 1, 2});
      at::SavedTensorDefaultHooks::enable();
      EXPECT_GT(one.gathered(), 0) << "its values are saved as they are";
      if (step != 1) y.sum().backward();
      one.engine->step();
      EXPECT_EQ(one.gathered(), 0) << step;
      {
        const at::NoGradGuard no_grad;
        through(*one.net, x, {0, 1, 2});
      }
      EXPECT_EQ(one.gathered(), 0) << "a forward after it is one as any other, step " << step;
      one.engine->zero_grad();
      if (step != 1) through(*one.twin, x, {0, 1, 2}).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      one.expect_twins();
      EXPECT_EQ(one.gathered(), 0) << step;
    }
  });
}

// Or until a backward that uses units is over, whichever those are.
TEST(Lingering, EndsWithABackwardOfAnotherUnit) {
  run_local(2, [](World world) {
    const Trained one(world, {.strategy = "zero3"});
    at::SavedTensorDefaultHooks::disable("a test");
    const at::Tensor h = one.net->layers[0]->forward(torch::ones({2, 6}));
    at::SavedTensorDefaultHooks::enable();
    EXPECT_GT(one.gathered(), 0);
    one.net->layers[1]->forward(h).sum().backward();
    EXPECT_EQ(one.gathered(), 0);
  });
}

// What lingers of before shards were written is used by nobody behind that.
TEST(Lingering, EndsWhereShardsWereWritten) {
  run_local(2, [](World world) {
    const Trained one(world, {.strategy = "zero3"});
    const at::Tensor x = torch::ones({2, 6});
    at::SavedTensorDefaultHooks::disable("a test");
    const at::Tensor before = one.net->layers[0]->forward(x).detach();
    at::SavedTensorDefaultHooks::enable();
    world.barrier();
    {
      at::NoGradGuard no_grad;
      for (auto& [name, shard] : one.engine->shards()) shard.mul_(2);
    }
    one.engine->shards_written();
    EXPECT_TRUE(one.net->layers[0]->forward(x).allclose(2 * before));
    world.barrier();
  });
}

// What somebody holds stays his, as he gathered it; whoever gathers after him has what was written.
TEST(Lingering, DoesNotEndWhatAScopeHoldsWhereShardsWereWritten) {
  run_local(2, [](World world) {
    const Trained one(world, {.strategy = "zero3"});
    const at::Tensor weight = one.net->layers[1].get()->weight;
    const at::Tensor before = one.engine->full_parameter(weight);
    {
      const Gathered scope = one.engine->gathered({weight});
      world.barrier();
      {
        at::NoGradGuard no_grad;
        for (auto& [name, shard] : one.engine->shards()) shard.mul_(2);
      }
      one.engine->shards_written();
      EXPECT_TRUE(weight.equal(before));
    }
    EXPECT_TRUE(one.engine->full_parameter(weight).equal(2 * before));
    world.barrier();
  });
}

// As a debugger does: what a node saved is whole then, and the next backward lets go of it.
TEST(Lingering, IsWhatSomebodyLookedAtUntilTheNextBackward) {
  run_local(2, [](World world) {
    Trained one(world, {.strategy = "zero3"});
    const at::Tensor x = torch::ones({2, 6}).requires_grad_();
    const at::Tensor y = one.net->layers[1]->forward(x);
    EXPECT_EQ(one.gathered(), 0);
    auto* node = dynamic_cast<torch::autograd::generated::AddmmBackward0*>(y.grad_fn().get());
    ASSERT_NE(node, nullptr);
    EXPECT_TRUE(node->mat2_.unpack(y.grad_fn()).equal(one.twin->layers[1].get()->weight.t()));
    EXPECT_GT(one.gathered(), 0);
    through(*one.net, x, {0, 2}).sum().backward();
    EXPECT_EQ(one.gathered(), 0);
    y.sum().backward();
    EXPECT_EQ(one.gathered(), 0);
  });
}

// A graph that recomputes may be walked after its engine has gone, over parameters that are whole again.
TEST(Lingering, AreGraphsThatRecomputeWhenTheirEngineHasGone) {
  run_local(2, [](World world) {
    Trained one(world, {.strategy = "zero3"});
    const at::Tensor x = torch::ones({2, 6}).requires_grad_(), same = torch::ones({2, 6}).requires_grad_();
    auto* layer = one.net->layers[1].get();
    at::Tensor y;
    {
      const UnitScope scope(unit::door_of(one.net->layers[1].ptr()));
      y = checkpoint([layer](const at::Tensor& in) { return torch::tanh(layer->forward(in)).pow(2); }, x);
    }
    one.engine.reset();
    world.barrier();
    y.sum().backward();
    torch::tanh(one.twin->layers[1]->forward(same)).pow(2).sum().backward();
    EXPECT_TRUE(x.grad().allclose(same.grad(), 1e-5, 1e-6));
    EXPECT_TRUE(layer->weight.grad().allclose(one.twin->layers[1].get()->weight.grad(), 1e-5, 1e-6));
    world.barrier();
  });
}

// Each replica gathers for itself, by messages that only its own ranks send.
TEST(Replicas, MayUseUnitsInOrdersOfTheirOwn) {
  run_local(4, [](World world) {
    Trained one(world, {.strategy = "hsdp", .mesh = {.replicate = 2, .shard = 2}}, 4);
    one.engine->impl().units->gather_together(1 << 20);
    torch::optim::SGD optimizer(one.twin->parameters(), 0.1);
    const auto order = [](int rank, int step) {
      return rank < 2    ? std::vector<int>{0, 1, 2, 3}
             : step == 1 ? std::vector<int>{3, 0, 2}
                         : std::vector<int>{2, 1, 0, 3};
    };
    for (int step = 0; step < 4; ++step) {
      const auto x = [&](int rank) { return torch::full({2, 6}, 0.3 * (rank + 1) + step); };
      through(*one.net, x(world.rank()), order(world.rank(), step)).sum().backward();
      for (int rank = 0; rank < 4; ++rank) (through(*one.twin, x(rank), order(rank, step)).sum() / 4).backward();
      one.engine->step();
      one.engine->zero_grad();
      optimizer.step();
      optimizer.zero_grad();
    }
    one.expect_twins();
  });
}

}  // namespace
}  // namespace plumb

// Models built in parts: each rank keeps its own, and an engine makes whole what it needs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "unit/storage.h"
#include "unit/support/net.h"

namespace plumb {
namespace {

using namespace test;

TEST(Deferred, BuildsTheValuesOfAnUnshardedModelInParts) {
  Net plain;
  for (const char* strategy : {"ddp", "zero2", "zero3", "hsdp"}) {
    run_local(3, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      std::unique_ptr<Net> net;
      {
        Deferred deferred(world);
        net = std::make_unique<Net>();
        EXPECT_ANY_THROW((net->first->up->weight + 1).sum().item<float>());
      }
      lock.unlock();
      Engine engine(world, *net, SGD{.lr = 0.1}, {.strategy = strategy});
      const auto parameters = net->parameters();
      const auto expected = plain.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(engine.full_parameter(parameters[i]).equal(expected[i])) << strategy << " " << i;
      }
      net->forward(torch::ones({1, 6})).sum().backward();
      engine.step();
    });
  }
}

TEST(Deferred, RanksThatSeedDifferentlyAreAnError) {
  try {
    run_local(2, [](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      torch::manual_seed(world.rank());
      Deferred deferred(world);
      Unit<torch::nn::Linear> linear(torch::nn::Linear(3, 4));
      lock.unlock();
      Engine engine(world, *linear.ptr(), SGD{.lr = 0.1}, {.strategy = "zero3"});
    });
    ADD_FAILURE() << "different values went through";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("seed the generator alike"));
  }
}

// The inner scope ends, and the outer goes on.
TEST(Deferred, ScopesMayLieInsideEachOther) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(3);
    const Deferred outer(world);
    {
      const Deferred inner(world);
    }
    const Unit<torch::nn::Linear> cut{torch::nn::Linear(4, 4)};
    EXPECT_ANY_THROW(cut->weight.sum()) << "it was built in parts";
  });
}

}  // namespace
}  // namespace plumb

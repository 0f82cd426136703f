// Units: what they keep, what they refuse, and how their values are reached; models built in parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "unit/storage.h"
#include "unit/support/net.h"

namespace plumb {
namespace {

using namespace test;

void on_two(const std::function<void(World, Net&, Engine&)>& body, const std::string& strategy = "zero3") {
  run_local(2, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
    body(world, net, engine);
  });
}

// A holder of modules is no module to be made from it.
TEST(Units, HoldWhatAnotherHolderHolds) {
  torch::nn::Sequential made(torch::nn::Linear(3, 4), torch::nn::ReLU(), torch::nn::Linear(4, 2));
  Unit<torch::nn::Sequential> moved{torch::nn::Sequential(made)}, copied{made};
  EXPECT_EQ(moved.get(), made.get());
  EXPECT_EQ(copied.get(), made.get());
  EXPECT_EQ(moved->forward(torch::ones({5, 3})).size(1), 2);
}

TEST(Units, KeepOnlyThisRanksShareOfTheParameters) {
  on_two([](World, Net& net, Engine& engine) {
    int64_t held = 0, whole = 0;
    for (const Bucket& bucket : engine.impl().reducer->buckets()) held += bucket.parameter.numel();
    for (const auto& p : net.parameters()) whole += p.numel();
    EXPECT_LE(held, whole / 2 + 200);
    EXPECT_EQ(net.first->up->weight.storage().nbytes() > 0, true);  // while the expression lasts
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Units, ABackwardHoldsFewUnitsAtATime) {
  on_two([](World, Net& net, Engine& engine) {
    std::vector<int64_t> seen;
    auto look = [&](const at::Tensor& tensor) {
      tensor.register_hook([&](const at::Tensor&) { seen.push_back(gathered(engine)); });
    };
    at::Tensor h = torch::ones({2, 6}).requires_grad_();
    look(h);
    const int64_t block = 4 * (6 * 12 + 12 + 12 * 6 + 6 + 3 * 16);  // f32, with room for padding
    for (int i = 0; i < 3; ++i) {
      h = net.first->forward(h);
      look(h);
      h = net.second->forward(h);
      look(h);
      EXPECT_EQ(gathered(engine), 0);
    }
    h.sum().backward();
    EXPECT_EQ(gathered(engine), 0);
    ASSERT_EQ(seen.size(), 7u);
    for (int64_t bytes : seen) EXPECT_LE(bytes, 2 * block);
  });
}

TEST(Units, SayWhatToDoWhenAReleasedParameterIsUsed) {
  if (!CanExplain<c10::StorageImpl>) GTEST_SKIP() << "this torch cannot take such a message back";
  on_two([](World, Net& net, Engine&) {
    const at::Tensor weight = net.first->up->weight;
    try {
      (weight + 1).sum().item<float>();
      FAIL() << "a released parameter was read";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("released"), testing::HasSubstr("first.")));
    }
  });
}

TEST(Units, FullParameterAndGatheredGiveWholeValues) {
  Net plain;
  on_two([&](World, Net& net, Engine& engine) {
    const auto whole = net.parameters();
    const auto expected = plain.parameters();
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(engine.full_parameter(whole[i]).equal(expected[i]));
    }
    const auto scope = engine.gathered(net.parameters());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(whole[i].detach().equal(expected[i]));
  });
}

TEST(Units, AWriteInsideAGatheredScopeIsRankZeros) {
  on_two([](World world, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    {
      at::NoGradGuard no_grad;
      const auto scope = engine.gathered({weight}, Access::write);
      weight.fill_(world.rank() == 0 ? 0.25 : 7.0);
    }
    EXPECT_TRUE(engine.full_parameter(weight).eq(0.25).all().item<bool>());
    EXPECT_TRUE(net.first->up->weight.detach().eq(0.25).all().item<bool>());
  });
}

TEST(Units, AChangeThatWouldBeLostIsAnError) {
  on_two([](World, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    EXPECT_THROW(
        {
          at::NoGradGuard no_grad;
          const auto scope = engine.gathered({weight});
          weight.fill_(1.0);
        },
        Error);
  });
}

TEST(Units, AChangeThroughAUnitIsAnErrorAtTheNextUse) {
  on_two([](World, Net& net, Engine& engine) {
    {
      at::NoGradGuard no_grad;
      net.first->up->weight.clamp_(-0.1, 0.1);
    }
    EXPECT_THAT([&] { engine.step(); },
                testing::ThrowsMessage<Error>(testing::AllOf(testing::HasSubstr("first.up.weight"),
                                                             testing::HasSubstr("changed through its unit"))));
    engine.step();  // told once
  });
}

TEST(Units, AParameterGivenOtherMemoryComesHomeAtTheNextStep) {
  for (const char* strategy : {"ddp", "zero3"}) {
    on_two(
        [](World world, Net& net, Engine& engine) {
          const at::Tensor weight = net.first->up->weight;
          const at::Tensor values = at::linspace(-1, 1, weight.numel()).view(weight.sizes());
          at::Tensor target = weight;
          target.set_data(values.clone());
          const at::Tensor x = torch::ones({2, 6});
          net.forward(x).pow(2).sum().backward();
          const at::Tensor gradient = engine.full_gradient(weight);
          engine.step();
          EXPECT_TRUE(engine.full_parameter(weight).allclose(values - 0.1 * gradient)) << "rank " << world.rank();
        },
        strategy);
  }
}

TEST(Units, OtherMemoryMustHoldTheSameOnEveryRank) {
  for (const bool both : {true, false}) {
    on_two([both](World world, Net& net, Engine& engine) {
      at::Tensor weight = net.first->up->weight;
      net.forward(torch::ones({2, 6})).pow(2).sum().backward();
      if (both || world.rank() == 1) weight.set_data(at::full(weight.sizes(), world.rank() * 1.0));
      EXPECT_THAT([&] { engine.step(); },
                  testing::ThrowsMessage<Error>(testing::AllOf(testing::HasSubstr("first.up.weight"),
                                                               testing::HasSubstr("other values on rank 1"))));
    });
  }
}

TEST(Units, WhatIsLoadedInsideAWritableScopeIsEverybodys) {
  on_two([](World world, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    {
      at::NoGradGuard no_grad;
      const auto scope = engine.gathered({weight}, Access::write);
      at::Tensor target = weight;
      target.set_data(at::full(weight.sizes(), world.rank() == 0 ? 0.5 : 3.0));
    }
    EXPECT_TRUE(engine.full_parameter(weight).eq(0.5).all().item<bool>());
    net.forward(torch::ones({1, 6})).sum().backward();
    engine.step();
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Units, AParameterOfAnotherDtypeOrShapeIsAnErrorAtTheNextStep) {
  for (const char* strategy : {"ddp", "zero2", "zero3"}) {
    for (const at::Tensor& other : {at::ones({12, 6}, at::kDouble), at::ones({3, 2})}) {
      on_two(
          [&](World, Net& net, Engine& engine) {
            net.forward(torch::ones({1, 6})).sum().backward();
            engine.step();
            at::Tensor weight = net.first->up->weight;
            net.forward(torch::ones({1, 6})).sum().backward();
            weight.set_data(other.clone());
            EXPECT_THROW(engine.step(), std::exception);
          },
          strategy);
    }
  }
}

TEST(Units, AStepInsideAScopeIsAnError) {
  on_two([](World, Net& net, Engine& engine) {
    const auto scope = engine.gathered(net.parameters());
    net.forward(torch::ones({1, 6})).sum().backward();
    EXPECT_THROW(engine.step(), Error);
  });
}

TEST(Units, ASavedParameterThatChangedIsAnErrorAsInPlainTorch) {
  on_two([](World, Net& net, Engine& engine) {
    auto loss = net.forward(torch::ones({1, 6})).pow(2).sum();
    loss.backward({}, true);
    engine.step();
    EXPECT_ANY_THROW(loss.backward());
    engine.zero_grad();
  });
}

TEST(Units, UnitsThatOneRankAloneUsesHangNobody) {
  on_two([](World world, Net& net, Engine& engine) {
    for (int step = 0; step < 3; ++step) {
      auto h = net.first->forward(torch::ones({1, 6}));
      if (world.rank() == step % 2) h = net.second->forward(net.outer->forward(h));
      h.sum().backward();
      engine.step();
      engine.zero_grad();
    }
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Units, NobodyReadsAShardThatAnotherRankHasNotUpdated) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Options options{.strategy = "zero3"};
    // Asked in the middle of the update: rank 1 takes its time.
    options.groups = {{.match =
                           [&](const std::string& name) {
                             if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                             return name.ends_with("scale");
                           },
                       .lr = {},
                       .weight_decay = {}}};
    Engine engine(world, net, SGD{.lr = 0.5}, options);
    std::vector<at::Tensor> before;
    for (const auto& p : net.parameters()) before.push_back(engine.full_parameter(p));
    net.forward(torch::ones({1, 6})).sum().backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : net.parameters()) gradients.push_back(engine.full_gradient(p));
    engine.step();
    const auto parameters = net.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!gradients[i].defined()) continue;
      EXPECT_TRUE(at::allclose(engine.full_parameter(parameters[i]), before[i] - 0.5 * gradients[i], 1e-5, 1e-6));
    }
  });
}

TEST(Units, AModelWithoutUnitsStaysWholeAndIsStillRight) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(1);
    torch::nn::Linear plain(4, 3);
    lock.unlock();
    Engine engine(world, *plain, SGD{.lr = 0.1}, {.strategy = "zero3"});
    plain(torch::ones({2, 4})).sum().backward();
    engine.step();
    EXPECT_EQ(engine.impl().units, nullptr);
  });
}

TEST(Units, ParametersAreWholeAgainWhenTheEngineIsGone) {
  Net plain;
  run_local(2, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    {
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    }
    EXPECT_TRUE(net.first->up->weight.equal(plain.first->up->weight));
    net.forward(torch::ones({1, 6})).sum().backward();
    EXPECT_TRUE(net.first->up->weight.grad().defined());
    world.barrier();
  });
}

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
        if (CanExplain<c10::StorageImpl>) {
          EXPECT_ANY_THROW((net->first->up->weight + 1).sum().item<float>());
        }
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

TEST(Deliver, IsAnOperatorToo) {
  on_two([](World, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    const auto deliver = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plumb::deliver", "")
                             .typed<void(at::Tensor, const at::Tensor&)>();
    const auto end = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::end_pass", "").typed<void(at::Tensor)>();
    deliver.call(weight, torch::full(weight.sizes(), 0.5));
    deliver.call(weight, torch::full(weight.sizes(), 0.25));
    end.call(weight);
    EXPECT_TRUE(engine.full_gradient(weight).eq(0.75).all().item<bool>());
    deliver.call(torch::empty({2}, at::kMeta), torch::empty({2}, at::kMeta));  // traced: nothing happens
    EXPECT_THROW(engine.deliver(weight, torch::ones({2})), Error);
    EXPECT_THROW(engine.deliver(torch::ones({2}), torch::ones({2})), Error);
    EXPECT_THROW(engine.end_pass(), Error);
  });
}

}  // namespace
}  // namespace plumb

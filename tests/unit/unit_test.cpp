// Units: what they keep and let go of, whose a parameter is, and what ranks that use them differently come to.
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

// As torch.chunk cuts, also where ranks get fewer rows than others, or none.
class RowsOf : public testing::TestWithParam<bool> {};

TEST_P(RowsOf, UnitsAreWhole) {
  run_local(4, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net, twin;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3", .cut = Cut::at_rows});
    if (GetParam())
      engine.impl().units->gather_together(16 << 20);  // by messages, and ahead: some are kept between steps
    const auto compare = [&] {
      std::map<std::string, at::Tensor> whole;
      for (const auto& item : twin.named_parameters()) whole[item.key()] = item.value().detach();
      const NamedTensors shards = engine.shards();
      EXPECT_GT(shards.size(), 8u);
      for (const auto& [name, rows] : shards) {
        const auto chunks = whole.at(name).chunk(4);
        const auto mine = static_cast<size_t>(world.rank());
        const at::Tensor expected = mine < chunks.size() ? chunks[mine].flatten() : at::empty({0});
        EXPECT_TRUE(rows.sizes() == expected.sizes() && rows.allclose(expected)) << name << " on rank " << mine;
      }
    };
    compare();
    std::vector<at::Tensor> once;  // tied ones, too
    for (const at::Tensor& parameter : twin.parameters()) {
      const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
      if (std::none_of(once.begin(), once.end(), same)) once.push_back(parameter);
    }
    torch::optim::SGD optimizer(once, 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = torch::ones({2, 6}) * (step + 1);
      net.forward(x).pow(2).mean().backward();
      twin.forward(x).pow(2).mean().backward();
      engine.step();
      engine.zero_grad();
      optimizer.step();
      optimizer.zero_grad();
    }
    compare();
    for (const auto& [name, rows] : engine.shards()) rows.mul_(2);  // by the user, on every rank
    engine.shards_written();
    at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : once) parameter.mul_(2);
    EXPECT_TRUE(net.forward(torch::ones({2, 6})).allclose(twin.forward(torch::ones({2, 6})), 1e-4));
  });
}

INSTANTIATE_TEST_SUITE_P(Ahead, RowsOf, testing::Bool());

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

// ---- frozen parameters

// A frozen base with flags and counts beside its weights, and small trained parts: as LoRA has it.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    base = register_parameter("base", torch::randn({8, 8}), /*requires_grad=*/false);
    mask = register_parameter("mask", torch::rand({8}) > 0.3, /*requires_grad=*/false);
    shift = register_parameter("shift", torch::arange(-3, 5, at::kShort), /*requires_grad=*/false);
    a = register_parameter("a", torch::randn({8, 2}));
    b = register_parameter("b", torch::randn({2, 8}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh((torch::matmul(x, base) + torch::matmul(x, a).matmul(b)) * mask + shift.to(at::kFloat) * 0.1);
  }
  at::Tensor base, mask, shift, a, b;
};
TORCH_MODULE(Adapted);

struct AdaptedNet : torch::nn::Module {
  AdaptedNet() {
    torch::manual_seed(9);
    for (int i = 0; i < 3; ++i) layers.emplace_back(register_module("layer" + std::to_string(i), Adapted()));
  }
  at::Tensor forward(at::Tensor h) {
    for (auto& layer : layers) h = layer->forward(h);
    return h;
  }
  std::vector<Unit<Adapted>> layers;
};

// What travels is what got memory for a reduced gradient.
TEST(Units, AFrozenBaseOfAnyDtypeCostsNoReductionAndNoGradientMemory) {
  AdaptedNet plain;
  torch::optim::SGD optimizer(plain.parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    for (int rank = 0; rank < 2; ++rank) (plain.forward(torch::ones({2, 8}) * (rank + 1)).pow(2).sum() / 2).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const bool deterministic : {false, true}) {
    for (const bool together : {false, true}) {
      run_local(2, [&](World world) {
        static std::mutex building;
        std::unique_lock lock(building);
        AdaptedNet net;
        lock.unlock();
        Options options{.strategy = "zero3"};
        options.deterministic = deterministic;
        options.virtual_ranks = 2;
        Engine engine(world, net, SGD{.lr = 0.1}, options);
        if (together) engine.impl().units->gather_together(16 << 20);
        for (int step = 0; step < 3; ++step) {
          net.forward(torch::ones({2, 8}) * (world.rank() + 1)).pow(2).sum().backward();
          engine.step();
          for (const Bucket& bucket : engine.impl().reducer->buckets()) {
            EXPECT_EQ(bucket.gradient.defined(), bucket.sinks[0]->parameter.requires_grad()) << bucket.sinks[0]->name;
          }
          engine.zero_grad();
        }
        const auto found = net.parameters(), expected = plain.parameters();
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(at::allclose(engine.full_parameter(found[i]).to(at::kFloat), expected[i].detach().to(at::kFloat),
                                   1e-4, 1e-5))
              << i;
        }
      });
    }
  }
}

// Thawed on all ranks and used by one alone, in the middle of a deterministic step or in a plain one.
TEST(Units, AThawedBaseIsReducedFromThenOn) {
  for (const bool deterministic : {false, true}) {
    AdaptedNet plain;
    torch::optim::SGD optimizer(plain.parameters(), torch::optim::SGDOptions(0.1));
    const auto passes = [&](auto& net, int rank, int step, const std::function<void(at::Tensor)>& run) {
      for (int pass = 0; pass < 4; ++pass) {
        for (auto& layer : net.layers) layer.get()->base.set_requires_grad(step > 0 && pass > 1);
        const bool mine = rank == 0 || pass < 3;
        run(mine ? net.forward(torch::ones({2, 8}) * (rank + pass + 1)).pow(2).sum() * 0.01
                 : net.layers[0]->forward(torch::ones({2, 8})).sum() * 0.01);
      }
    };
    for (int step = 0; step < 3; ++step) {
      for (int rank = 0; rank < 2; ++rank) passes(plain, rank, step, [](at::Tensor loss) { (loss / 2).backward(); });
      optimizer.step();
      optimizer.zero_grad();
    }
    run_local(2, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      AdaptedNet net;
      lock.unlock();
      Options options{.strategy = "zero3"};
      options.deterministic = deterministic;
      options.virtual_ranks = 8;
      Engine engine(world, net, SGD{.lr = 0.1}, options);
      for (int step = 0; step < 3; ++step) {
        passes(net, world.rank(), step, [](at::Tensor loss) { loss.backward(); });
        engine.step();
        engine.zero_grad();
      }
      const auto found = net.parameters(), expected = plain.parameters();
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::allclose(engine.full_parameter(found[i]).to(at::kFloat), expected[i].detach().to(at::kFloat),
                                 1e-4, 1e-5))
            << i << " deterministic " << deterministic;
      }
    });
  }
}

// ---- whose a parameter is

// A weight that two units share, one that is also used outside of all units, and one inside a unit inside a unit.
struct SharingNet : torch::nn::Module {
  SharingNet() {
    torch::manual_seed(4);
    one = register_module("one", torch::nn::Linear(6, 6));
    two = register_module("two", torch::nn::Linear(6, 6));
    three = register_module("three", torch::nn::Linear(6, 6));
    outside = register_module("outside", torch::nn::Linear(6, 6));
    two->weight = two->register_parameter("same", one.get()->weight);
    outside->weight = outside->register_parameter("same", three.get()->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = torch::tanh(one->forward(x));
    h = torch::tanh([&] {
      UnitScope scope(unit::door_of(two.ptr()));
      return torch::linear(h, two.get()->weight, two.get()->bias);
    }());
    h = torch::tanh(three->forward(h));
    return torch::linear(h, outside->weight, outside->bias);
  }
  Unit<torch::nn::Linear> one{nullptr}, two{nullptr}, three{nullptr};
  torch::nn::Linear outside{nullptr};
};

TEST(Units, ASharedWeightBelongsToTheFirstUnitAndOneUsedOutsideStaysWhole) {
  SharingNet plain;
  std::vector<at::Tensor> each;  // once: a shared weight has two names
  for (const auto& p : plain.parameters()) {
    if (std::none_of(each.begin(), each.end(), [&](const auto& one) { return one.is_same(p); })) each.push_back(p);
  }
  torch::optim::SGD optimizer(each, torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    for (int rank = 0; rank < 3; ++rank) (plain.forward(torch::ones({2, 6}) * (rank + 1)).pow(2).sum() / 3).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  run_local(3, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    SharingNet net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    Units& units = *engine.impl().units;
    EXPECT_TRUE(units.owns(net.one.get()->weight));
    EXPECT_TRUE(units.owns(net.three.get()->bias));
    EXPECT_FALSE(units.owns(net.three.get()->weight));
    EXPECT_TRUE((net.outside->weight + 1).defined());  // outside of every scope
    for (int step = 0; step < 3; ++step) {
      net.forward(torch::ones({2, 6}) * (world.rank() + 1)).pow(2).sum().backward();
      EXPECT_EQ(gathered(engine), 0);
      engine.step();
      engine.zero_grad();
    }
    for (const auto& expected : plain.named_parameters()) {
      const at::Tensor found = engine.full_parameter(net.named_parameters()[expected.key()]);
      EXPECT_TRUE(at::allclose(found, expected.value(), 1e-4, 1e-5)) << expected.key();
    }
  });
}

// ---- before the engine

// Rank 0's values are everybody's already: a graph over them stays good. Where a unit's parameters are cut, it says so.
TEST(Units, AGraphBuiltBeforeTheEngineStaysGood) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      Net net, plain;
      lock.unlock();
      const at::Tensor x = torch::ones({2, 6}) * (world.rank() + 1);
      const at::Tensor loss = net.forward(x).pow(2).sum();
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
      loss.backward();
      for (int rank = 0; rank < 2; ++rank)
        (plain.forward(torch::ones({2, 6}) * (rank + 1)).pow(2).sum() / 2).backward();
      const auto found = net.parameters(), expected = plain.parameters();
      for (size_t i = 0; i < found.size(); ++i) {
        const at::Tensor gradient = engine.full_gradient(found[i]);
        ASSERT_EQ(gradient.defined(), expected[i].grad().defined()) << i;
        EXPECT_TRUE(!gradient.defined() || at::allclose(gradient, expected[i].grad(), 1e-4, 1e-5)) << i;
      }
    });
  }
}

// Other values than rank 0's are taken over, one of many in a message.
TEST(Units, TheEngineStartsFromRankZerosValues) {
  for (const char* strategy : {"ddp", "zero3"}) {
    Net plain;
    run_local(3, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      Net net;
      lock.unlock();
      {
        at::NoGradGuard no_grad;
        net.second->up->weight.add_(world.rank());
        net.outer->scale[2] += 0.5 * world.rank();
      }
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
      const auto found = net.parameters(), expected = plain.parameters();
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(engine.full_parameter(found[i]).equal(expected[i])) << i;
      }
    });
  }
}

// Every second column of one tensor each: they lie between each other, and share nothing.
struct Interleaved : torch::nn::Module {
  explicit Interleaved(int64_t second) {
    torch::manual_seed(2);
    const at::Tensor base = torch::randn({6, 8});
    even = register_parameter("even", base.slice(1, 0, 8, 2).detach());
    odd = register_parameter("odd", base.slice(1, second, 8, 2).detach());
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x.matmul(even)) * x.matmul(odd); }
  at::Tensor even, odd;
};

TEST(Units, ParametersBetweenEachOtherInMemoryAreTwo) {
  Interleaved plain(1);
  torch::optim::SGD optimizer(plain.parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 2; ++step) {
    for (int rank = 0; rank < 2; ++rank) (plain.forward(torch::ones({2, 6}) * (rank + 1)).pow(2).sum() / 2).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    run_local(2, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      Unit<Interleaved> net{std::make_shared<Interleaved>(1)};
      lock.unlock();
      Engine engine(world, *net.ptr(), SGD{.lr = 0.1}, {.strategy = strategy});
      for (int step = 0; step < 2; ++step) {
        net->forward(torch::ones({2, 6}) * (world.rank() + 1)).pow(2).sum().backward();
        engine.step();
        engine.zero_grad();
      }
      const auto found = net.ptr()->parameters(), expected = plain.parameters();
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::allclose(engine.full_parameter(found[i]), expected[i], 1e-4, 1e-5)) << strategy << i;
      }
    });
  }
  Interleaved same(0);
  EXPECT_THAT([&] { Engine(World(), same, SGD{.lr = 0.1}); },
              testing::ThrowsMessage<Error>(
                  testing::AllOf(testing::HasSubstr("'even' and 'odd'"), testing::HasSubstr("share memory"))));
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

}  // namespace
}  // namespace plumb

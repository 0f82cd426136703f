// What agreement costs by the number of ranks: counted in rounds, messages and waits, of which none may grow faster than log₂.
#include <gtest/gtest.h>

#include <bit>

#include "layout/duration.h"
#include "unit/support/net.h"
#include "watch/timeline.h"
#include "watch/wire.h"

namespace plumb {
namespace {

using scenarios::Alike;

struct Cost {
  Wire::Count pass, step, gather;
};

Wire::Count of(const World& world, Cargo cargo) { return wire_counts(world)[static_cast<size_t>(cargo)]; }

// Of one step of five units in the steady state, on rank 0.
Cost measure(int ranks, const std::string& strategy) {
  Cost cost;
  run_local(ranks, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    Alike net(5);
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
    if (strategy == "zero3") engine.impl().units->gather_together(1);
    for (int step = 0; step < 3; ++step) {
      const Wire::Count begin = of(world, Cargo::control), gathers = of(world, Cargo::gather);
      at::Tensor h = torch::ones({2, 6});
      for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
      h.sum().backward();
      const Wire::Count between = of(world, Cargo::control);
      engine.step();
      engine.zero_grad();
      if (step < 2 || world.rank() != 0) continue;
      cost.pass = between - begin;
      cost.step = of(world, Cargo::control) - between;
      cost.gather = of(world, Cargo::gather) - gathers;
    }
  });
  return cost;
}

class Scale : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Scale, ::testing::Values(2, 3, 4, 8, 16, 32, 64));

// A pass is one host round trip, forwards and gathers included, and a step another, each log₂ N rounds deep.
TEST_P(Scale, APassAndAStepAreOneRoundTripEach) {
  const int ranks = GetParam();
  const int64_t deep = std::bit_width(static_cast<unsigned>(ranks - 1)) + 1;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    const Cost cost = measure(ranks, strategy);
    EXPECT_EQ(cost.pass.waits, 1) << strategy;
    EXPECT_LE(cost.pass.rounds, deep) << strategy;
    EXPECT_EQ(cost.step.waits, 1) << strategy;
    EXPECT_LE(cost.step.rounds, deep) << strategy;
    EXPECT_LE(cost.pass.bytes, 8 * 64 * deep) << strategy;
    if (std::string(strategy) == "zero3") {
      EXPECT_EQ(cost.gather.rounds, 8);  // five forwards, the first two as one, and four backwards: the last stays
      EXPECT_EQ(cost.gather.messages, 8 * (ranks - 1));
    } else {
      EXPECT_EQ(cost.gather.messages, 0) << strategy;
    }
  }
}

// Of a backward through so many units under hsdp: how many reductions had not ended when the last one began.
int64_t on_their_way_at_the_last(int units) {
  int64_t count = 0;
  run_local(4, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    Alike net(units);
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "hsdp", .mesh = {.replicate = 2, .shard = 2}});
    Timeline& timeline = timeline_of(world);
    timeline.start();
    at::Tensor h = torch::ones({2, 6});
    for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
    h.sum().backward();
    auto events = timeline.events();
    timeline.stop();
    std::erase_if(events, [](const auto& event) { return std::string(event.track) != tracks::buckets; });
    EXPECT_EQ(static_cast<int>(events.size()), units);
    Timeline::Moment last{};
    for (const auto& event : events) last = std::max(last, event.begin);
    if (world.rank() == 0)
      count = std::count_if(events.begin(), events.end(), [&](const auto& event) { return event.end > last; });
  });
  return count;
}

// What was scattered inside of a replica crosses to the others beside the next ones; eight, and two before that.
TEST(ScaleOfReplicas, PiecesCrossBesideWhatFollowsAFewAtATime) {
  EXPECT_EQ(on_their_way_at_the_last(6), 6);
  EXPECT_EQ(on_their_way_at_the_last(20), 10);
}

// Equal units, which any number of ranks up to 64 divides without a rest.
struct Even : torch::nn::Module {
  static constexpr int64_t width = 96, units = 5;
  Even() {
    for (int64_t i = 0; i < units; ++i) {
      layers.emplace_back(register_module("layer" + std::to_string(i),
                                          torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false))));
    }
  }
  static ModelShape shape() {
    return {.units = std::vector<int64_t>(units, width * width), .others = 0, .largest = width * width};
  }
  std::vector<Unit<torch::nn::Linear>> layers;
};

// Rounds and bytes of a step in the steady state are those that `plumb estimate` predicts: exactly.
TEST_P(Scale, WhatIsCountedIsWhatTheModelOfTheCostSays) {
  const int ranks = GetParam();
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    if (strategy == std::string("hsdp") && ranks % 4 != 0) continue;  // two replicas, of equal shards
    SCOPED_TRACE(strategy);
    std::mutex mutex;
    Wire::Count data, control, gather;  // of rank 0; of control, of the rank with most rounds
    run_local(ranks, [&](World world) {
      std::unique_lock building(mutex);
      torch::manual_seed(7);
      Even net;
      building.unlock();
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
      if (plumb::strategy(strategy).parameter == Placement::sharded) engine.impl().units->gather_together(1);
      Wire::Counts before;
      for (int step = 0; step < 3; ++step) {
        before = wire_counts(world);
        at::Tensor h = torch::ones({2, Even::width});
        for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
        h.sum().backward();
        engine.step();
        engine.zero_grad();
      }
      const Wire::Counts after = wire_counts(world);
      const auto more = [&](Cargo cargo) {
        const auto kind = static_cast<size_t>(cargo);
        return after[kind] - before[kind];
      };
      const std::lock_guard lock(mutex);
      if (more(Cargo::control).rounds > control.rounds) control = more(Cargo::control);
      if (world.rank() == 0) data = more(Cargo::data), gather = more(Cargo::gather);
    });
    const Strategy& row = plumb::strategy(strategy);
    const Plan plan{.row = row, .mesh = mesh_of(row, {}, ranks), .recipe = kFloat32};
    const Messages said = messages_of(Even::shape(), plan, {.gather_ahead_bytes = 1}, Carriage::ring);
    EXPECT_EQ(control.rounds, 2 * said.control_rounds);
    EXPECT_EQ(data.rounds, said.reductions * said.reduction_rounds + said.updates * said.updated_rounds);
    EXPECT_EQ(static_cast<double>(data.bytes), said.reduction_bytes + said.updated_bytes);
    EXPECT_EQ(static_cast<double>(gather.bytes), said.forward_bytes + said.backward_bytes);
  }
}

// The check of the model: the same for every rank, however many there are.
TEST_P(Scale, AnEngineIsBuiltWithABoundedNumberOfHostMessages) {
  const int ranks = GetParam();
  const int64_t deep = std::bit_width(static_cast<unsigned>(ranks - 1)) + 1;
  run_local(ranks, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    Alike net(5);
    lock.unlock();
    const Wire::Count before = of(world, Cargo::control);
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "ddp"});
    const Wire::Count more = of(world, Cargo::control) - before;
    EXPECT_LE(more.waits, 4);
    EXPECT_LE(more.rounds, 4 * deep);
    EXPECT_LE(more.bytes, 4 * deep * 64);
  });
}

}  // namespace
}  // namespace plumb

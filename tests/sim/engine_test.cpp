// The engine on the simulated accelerator: every stream scenario on every strategy, no race, and the bits of the CPU.
#include <algorithm>
#include <set>

#include "engine/impl.h"
#include "plumb/strategy.h"
#include "scenarios/support/models.h"
#include "sim/actor.h"
#include "sim/scenarios.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

using Case = std::tuple<size_t, std::string>;  // scenario, strategy

class Streams : public testing::TestWithParam<Case> {
 protected:
  const Scenario& scenario() const { return scenarios()[std::get<0>(GetParam())]; }
  const std::string& strategy() const { return std::get<1>(GetParam()); }
};

// Whether two operations are ordered does not depend on the seed: few show every race.
TEST_P(Streams, ShowNoRace) {
  const Played played = play(scenario(), strategy(), 0, 2, After::stop);
  EXPECT_EQ(played.races, 0u) << played.report;
}

TEST_P(Streams, GiveTheBitsOfTheCpuInEveryOrder) {
  const bool of_streams = scenario().id.rfind('T', 0) == 0;
  const Played played = play(scenario(), strategy(), 100, of_streams ? 200 : 15, After::stop);
  EXPECT_TRUE(played.good()) << "seed " << played.first_bad << "\n" << played.report;
  EXPECT_EQ(played.orders, played.seeds);
  // Deterministic mode adds up the norm on the host.
  EXPECT_EQ(played.device_waits > 0, scenario().options.deterministic);
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) names.push_back(row.name);
  return names;
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Scenario& scenario = scenarios()[std::get<0>(info.param)];
  std::string name = (scenario.id.empty() ? "" : scenario.id + "_") + scenario.name + "_" + std::get<1>(info.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Table, Streams,
                         testing::Combine(testing::Range<size_t>(0, scenarios().size()),
                                          testing::ValuesIn(strategy_names())),
                         name_of);

TEST(Replay, OfTheEngineIsOneOrderForOneSeed) {
  for (const char* strategy : {"ddp", "zero3"}) {
    for (uint64_t seed = 0; seed < few_seeds; ++seed) {
      std::set<uint64_t> orders;
      for (int repeat = 0; repeat < 2; ++repeat) {
        const Scenario& scenario = *scenarios_called("refill").front();
        Session session(seed);
        run_world(2, [&](World world) {
          Actor actor(scenario, world, strategy, device(world.rank()));
          scenario.program(actor);
        });
        orders.insert(session.statistics().order);
      }
      EXPECT_EQ(orders.size(), 1u) << strategy << ", seed " << seed;
    }
  }
}

// A device's backend would mix up what ranks gather, so they ask, a window at a time: what all expect next is gathered ahead, it is
// what they use, and nothing else is gathered.
TEST(Gathers, AskedForBringTheWindowAhead) {
  for (const bool wide : {false, true}) {
    Session session(5);
    run_world(2, [&](World world) {
      scenarios::Alike net(5);
      net.to(device(world.rank()));
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3", .gather_ahead_bytes = wide ? 1 << 20 : 1});
      Units& units = *engine.impl().units;
      const int64_t one = engine.impl().reducer->buckets()[0].numel * 4;  // bytes; each unit is a bucket of this size
      for (int step = 0; step < 3; ++step) {
        const int64_t before = units.gathers();
        std::vector<int64_t> forward;
        at::Tensor h = at::ones({2, 6}, on(world.rank()));
        for (auto& layer : net.layers) {
          const UnitScope scope(unit::door_of(layer.ptr()));
          h = torch::tanh(layer.get()->forward(h));
          forward.push_back(units.gathered_bytes() / one);
        }
        h.sum().backward();
        EXPECT_EQ(units.gathers() - before, step == 0 ? 10
                                            : wide    ? 5
                                                      : 9)
            << "once, or as often as it must be, in step " << step;
        EXPECT_EQ(units.gathered_bytes(), 0) << step;
        (void)engine.step();
        engine.zero_grad();
        EXPECT_EQ(forward, step == 0 ? std::vector<int64_t>(5, 1)
                           : wide    ? std::vector<int64_t>(5, 5)
                                     : std::vector<int64_t>({2, 2, 2, 2, 1}))
            << step;
      }
    });
    session.finish();
    EXPECT_TRUE(session.races().empty()) << session.report();
  }
}

TEST(Worlds, TellTheErrorThatCameFirst) {
  Session session(0);
  try {
    run_world(3, [](World world) {
      if (world.rank() == 1) throw Error(1, "out of data");
      world.barrier();
    });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("out of data"));
  }
}

}  // namespace
}  // namespace plumb::sim

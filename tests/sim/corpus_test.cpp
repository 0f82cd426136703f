// The corpus of scenarios on the simulated accelerator: ordinary programs of one stream, no alarm, the numbers of the CPU
// (nearly its bits: a double backward may add in another order on the thread of a device).
#include <algorithm>

#include "scenarios/support/corpus.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

using Case = std::tuple<size_t, std::string>;  // scenario, strategy

// Programs that make tensors on the CPU themselves, need what the device has not got, or take too long.
const std::vector<std::string> not_here = {"AssignsGradientsOfOtherStorageAndStrides",
                                           "AssignsAGradientToAFrozenParameter", "SparseGradientsOfAnEmbedding",
                                           "ThousandsOfTinyParameters"};

bool plays(const scenarios::Scenario& scenario, const Strategy& row) {
  const auto named = [&](const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), scenario.name) != names.end();
  };
  const bool refused = row.gradient == Placement::sharded && !scenario.refused_with_pieces.empty();
  return !refused && !named(not_here);
}

class Corpus : public testing::TestWithParam<Case> {};

TEST_P(Corpus, HasTheNumbersOfTheCpuAndNoRace) {
  const auto& [index, strategy] = GetParam();
  const scenarios::Scenario& scenario = scenarios::corpus()[index];
  const Strategy& row = plumb::strategy(strategy);
  if (!plays(scenario, row)) GTEST_SKIP() << "not a program for this device";
  const auto expected = scenarios::play_engine(scenario, 2, strategy, 1);
  Session session(index);
  scenarios::Outcome found;
  run_world(2, [&](World world) {
    auto mine = scenarios::play_on(world, scenario, strategy, device(world.rank()));
    if (world.rank() == 1) found = std::move(mine);
  });
  EXPECT_EQ(scenarios::difference(expected, found, 1e-6), "") << scenario.name;
  EXPECT_EQ(session.report(), "no races\n") << scenario.name;
}

INSTANTIATE_TEST_SUITE_P(Table, Corpus,
                         testing::Combine(testing::Range<size_t>(0, scenarios::corpus().size()),
                                          testing::Values("ddp", "zero2", "zero3")),
                         [](const testing::TestParamInfo<Case>& info) {
                           const auto& scenario = scenarios::corpus()[std::get<0>(info.param)];
                           return scenario.id + "_" + scenario.name + "_" + std::get<1>(info.param);
                         });

}  // namespace
}  // namespace plumb::sim

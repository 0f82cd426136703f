// Units on a device whose streams run in any order: gathered, read, kept and freed without a race, with the numbers of the CPU, also
// where ranks use different ones. tests/sim plays all of it in many more orders.
#include <gtest/gtest.h>

#include "plumb/sim.h"
#include "scenarios/support/corpus.h"
#include "sim/scenarios.h"

namespace plumb::sim {
namespace {

struct Accelerator final : testing::Environment {
  void SetUp() override { init(4); }
};
const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

class OnStreams : public testing::TestWithParam<std::tuple<size_t, std::string>> {};

TEST_P(OnStreams, UnitsRaceWithNobody) {
  const auto& [index, strategy] = GetParam();
  const Played played = play(scenarios()[index], strategy, 3, 2, After::stop);
  EXPECT_TRUE(played.good()) << played.report;
}

INSTANTIATE_TEST_SUITE_P(Table, OnStreams,
                         testing::Combine(testing::Range<size_t>(0, scenarios().size()),
                                          testing::Values("zero3", "hsdp")),
                         [](const auto& info) {
                           std::string name = scenarios()[std::get<0>(info.param)].name + "_" + std::get<1>(info.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace plumb::sim

// Ranks that use different units, where a stream that waits for another rank holds up what that rank needs of this one: nobody waits
// for a rank that waits for him.
#include <gtest/gtest.h>

#include <array>

#include "scenarios/support/walks.h"
#include "sim/support/support.h"
#include "slowness.h"

namespace plumb::sim {
namespace {

class Parting : public testing::TestWithParam<int> {};

// A window that holds everything, one that holds next to nothing, and between.
TEST_P(Parting, OfRanksOnStreamsIsRightWhateverTheyUse) {
  const int ranks = GetParam();
  for (uint64_t seed = 0; seed < 24 / slowness; ++seed) {
    scenarios::Scenario scenario = scenarios::walks(seed);
    scenario.options.gather_ahead_bytes = std::array<int64_t, 3>{1 << 20, 1, 600}[seed % 3];
    const auto expected = scenarios::play_reference(scenario, ranks);
    Session session(seed);
    scenarios::Outcome found;
    run_world(ranks, [&](World world) {
      auto mine = scenarios::play_on(world, scenario, "zero3", device(world.rank()));
      if (world.rank() == ranks - 1) found = std::move(mine);
    });
    ASSERT_EQ(scenarios::difference(expected, found, scenario.tolerance), "") << "seed " << seed;
    ASSERT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parting, testing::Values(2, 3));

}  // namespace
}  // namespace plumb::sim

// Every scenario of the corpus over sharded parameters: read in place, and gathered by collectives that ranks must ask for, since
// their backend would mix up what they gather. What users do, played by the tests that are nearest to units.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scenarios/support/corpus.h"

namespace plumb::scenarios {
namespace {

class UnitCorpus : public testing::TestWithParam<size_t> {};

TEST_P(UnitCorpus, OverShardedParametersEqualsTheReference) {
  const Scenario& scenario = corpus()[GetParam()];
  const Outcome expected = play_reference(scenario, 2);
  for (const Medium medium : {Medium::plain, Medium::asking}) {
    SCOPED_TRACE(medium == Medium::asking ? "asking" : "in place");
    const auto play = [&] { return play_engine(scenario, 2, "zero3", 0, medium); };
    if (scenario.refused_with_pieces.empty()) {
      EXPECT_EQ(difference(expected, play(), scenario.tolerance), "");
    } else {
      EXPECT_THAT(play, testing::ThrowsMessage<Error>(testing::HasSubstr(scenario.refused_with_pieces)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, UnitCorpus, testing::Range<size_t>(0, corpus().size()),
                         [](const auto& info) { return corpus()[info.param].id + "_" + corpus()[info.param].name; });

}  // namespace
}  // namespace plumb::scenarios

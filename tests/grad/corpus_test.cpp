// Every scenario of the corpus on two ranks, once for each way of summing: what users do, played by the tests that are
// nearest to the reducer. tests/scenarios plays them on every strategy and world.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scenarios/support/corpus.h"
#include "scenarios/support/fuzz.h"

namespace plumb::scenarios {
namespace {

class Corpus : public testing::TestWithParam<size_t> {};

TEST_P(Corpus, OnTwoRanksEqualsTheReference) {
  const Scenario& scenario = corpus()[GetParam()];
  const Outcome expected = play_reference(scenario, 2);
  // Messages are dear where gradients alone are sharded: there small ones travel together, and cleared gradients keep no memory.
  for (const auto& [strategy, medium] : {std::pair("ddp", Medium::plain), std::pair("zero2", Medium::dear),
                                         std::pair("zero3", Medium::plain), std::pair("zero3", Medium::asking)}) {
    SCOPED_TRACE(scenario.id + " " + scenario.name + ", " + strategy + (medium == Medium::asking ? ", asking" : ""));
    const bool pieces = plumb::strategy(strategy).gradient == Placement::sharded;
    if (pieces && !scenario.refused_with_pieces.empty()) {
      try {
        play_engine(scenario, 2, strategy, 1, medium);
        ADD_FAILURE() << "expected an Error: " << scenario.refused_with_pieces;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(scenario.refused_with_pieces));
      }
    } else {
      EXPECT_EQ(difference(expected, play_engine(scenario, 2, strategy, 1, medium), scenario.tolerance), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, Corpus, testing::Range<size_t>(0, corpus().size()),
                         [](const auto& info) { return corpus()[info.param].id + "_" + corpus()[info.param].name; });

// The fuzzer's first programs, the same every time.
class DrawnPrograms : public testing::TestWithParam<uint64_t> {};

TEST_P(DrawnPrograms, EqualTheReference) {
  for (uint64_t seed = GetParam() * 10; seed < (GetParam() + 1) * 10; ++seed) {
    const FuzzCase one = random_case(seed);
    EXPECT_EQ(play(one), "") << tell(one);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DrawnPrograms, testing::Range<uint64_t>(0, 12));

}  // namespace
}  // namespace plumb::scenarios

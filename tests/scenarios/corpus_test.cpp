// Every scenario on every strategy at world sizes 1 to 4, against the one-process reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scenarios/support/corpus.h"

namespace plumb::scenarios {
namespace {

using Case = std::tuple<size_t, std::string, int>;  // scenario, strategy, ranks

class Corpus : public testing::TestWithParam<Case> {};

TEST_P(Corpus, EqualsTheReference) {
  const auto& [index, strategy, ranks] = GetParam();
  const Scenario& scenario = corpus()[index];
  const Strategy& row = plumb::strategy(strategy);
  const bool pieces = row.gradient == Placement::sharded && mesh_of(row, {}, ranks).shard > 1;
  if (pieces && !scenario.refused_with_pieces.empty()) {
    try {
      play_engine(scenario, ranks, strategy);
      FAIL() << "expected an Error: " << scenario.refused_with_pieces;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(scenario.refused_with_pieces));
    }
    return;
  }
  const Outcome expected = play_reference(scenario, ranks);
  for (int of : {0, ranks - 1}) {
    const Outcome found = play_engine(scenario, ranks, strategy, of);
    EXPECT_EQ(difference(expected, found, scenario.tolerance), "")
        << scenario.id << " " << scenario.name << ", " << strategy << ", rank " << of << " of " << ranks;
    if (ranks == 1) break;
  }
}

// As it is over gloo: small reductions travel together, here two by two, and large gradients that were cleared have no
// memory, here all of them.
class CorpusTogether : public testing::TestWithParam<std::tuple<size_t, std::string>> {};

TEST_P(CorpusTogether, EqualsTheReference) {
  const auto& [index, strategy] = GetParam();
  Scenario scenario = corpus()[index];
  scenario.options.bucket_bytes = 2000;
  const bool pieces = plumb::strategy(strategy).gradient == Placement::sharded;
  if (pieces && !scenario.refused_with_pieces.empty()) GTEST_SKIP() << "refused where gradients are sharded";
  const Outcome expected = play_reference(scenario, 3);
  EXPECT_EQ(difference(expected, play_engine(scenario, 3, strategy, 2, Medium::dear), scenario.tolerance), "");
}

INSTANTIATE_TEST_SUITE_P(Table, CorpusTogether,
                         testing::Combine(testing::Range<size_t>(0, corpus().size()),
                                          testing::Values("ddp", "zero1", "zero2", "zero3")),
                         [](const auto& info) {
                           const Scenario& scenario = corpus()[std::get<0>(info.param)];
                           return scenario.id + "_" + scenario.name + "_" + std::get<1>(info.param);
                         });

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) names.push_back(row.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Table, Corpus,
                         testing::Combine(testing::Range<size_t>(0, corpus().size()),
                                          testing::ValuesIn(strategy_names()), testing::Values(1, 2, 3, 4)),
                         [](const testing::TestParamInfo<Case>& info) {
                           const Scenario& scenario = corpus()[std::get<0>(info.param)];
                           return scenario.id + "_" + scenario.name + "_" + std::get<1>(info.param) + "_" +
                                  std::to_string(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace plumb::scenarios

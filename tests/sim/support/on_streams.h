// The engine's stream scenarios as tests of a folder that they guard: under its strategies, in a few orders. tests/sim plays all of
// them in many more.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "plumb/sim.h"
#include "sim/scenarios.h"

namespace plumb::sim {

struct Accelerator final : testing::Environment {
  void SetUp() override { init(4); }
};

using OnStreams = testing::TestWithParam<std::tuple<size_t, std::string>>;

inline void plays(const std::tuple<size_t, std::string>& row) {
  const auto& [index, strategy] = row;
  const Played played = play(scenarios()[index], strategy, 3, 2, After::stop);
  EXPECT_TRUE(played.good()) << played.report;
}

inline auto each_under(const std::vector<std::string>& strategies) {
  return testing::Combine(testing::Range<size_t>(0, scenarios().size()), testing::ValuesIn(strategies));
}

inline std::string name_of(const testing::TestParamInfo<std::tuple<size_t, std::string>>& info) {
  std::string name = scenarios()[std::get<0>(info.param)].name + "_" + std::get<1>(info.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace plumb::sim

// How long a step takes by the formula: what it must come to at its edges, and what may grow with the ranks.
#include "layout/duration.h"

#include <gtest/gtest.h>

namespace plumb {
namespace {

const ModelShape kModel{.units = std::vector<int64_t>(10, 100'000'000), .others = 0, .largest = 10'000'000};

Plan plan_of(const std::string& name, int ranks) {
  const Strategy& row = strategy(name);
  return {.row = row, .mesh = mesh_of(row, {}, ranks), .recipe = kFloat32};
}

TEST(Duration, OnOneRankIsComputeAlone) {
  const Load load{.flops = 1e12, .tokens = 1000};
  for (const Strategy& row : strategies()) {
    const Duration found = duration(kModel, plan_of(row.name, 1), {.latency = 1, .bytes_per_second = 1}, load);
    EXPECT_DOUBLE_EQ(found.step, 6.0 * 1e9 * 1000 / 1e12) << row.name;
    EXPECT_EQ(found.exposed, 0) << row.name;
  }
}

TEST(Duration, OverLinksThatCostNothingIsComputeAlone) {
  for (const Strategy& row : strategies()) {
    const Duration found = duration(kModel, plan_of(row.name, 64), {}, {.flops = 1e12, .tokens = 1000});
    EXPECT_NEAR(found.step, 6.0, 1e-9) << row.name;
  }
}

// Bytes alone: 2(N-1)/N of all gradients for ddp, the same for zero2, and half as much again for zero3 without a window.
TEST(Duration, WithoutComputeIsWhatTravels) {
  const Link link{.latency = 0, .bytes_per_second = 1e9};
  const Load load{.gather_ahead_bytes = 0};
  EXPECT_NEAR(duration(kModel, plan_of("ddp", 4), link, load).step, 2 * 0.75 * 4, 1e-9);
  EXPECT_NEAR(duration(kModel, plan_of("zero1", 4), link, load).step, 3 * 0.75 * 4, 1e-9);
  EXPECT_NEAR(duration(kModel, plan_of("zero2", 4), link, load).step, 2 * 0.75 * 4, 1e-9);
  EXPECT_NEAR(duration(kModel, plan_of("zero3", 4), link, load).step, 3 * 0.75 * 4, 1e-9);
}

TEST(Duration, HidesBehindTheBackwardWhatFitsThere) {
  const Load load{.flops = 1e12, .tokens = 3000};  // 6 s forwards, 12 s backwards
  const Duration found = duration(kModel, plan_of("ddp", 4), {.bytes_per_second = 1e9}, load);
  EXPECT_NEAR(found.data, 6, 1e-9);
  EXPECT_NEAR(found.exposed, 6.0 * (4 << 20) / 4e9, 1e-9);  // the last bucket
  EXPECT_NEAR(duration(kModel, plan_of("ddp", 4), {.bytes_per_second = 0.4e9}, load).exposed, 15 - 12, 1e-9);
}

TEST(Duration, HostMessagesGrowWithTheLogarithm) {
  EXPECT_EQ(control_rounds(1), 0);
  EXPECT_EQ(control_rounds(2), 1);
  EXPECT_EQ(control_rounds(3), 3);
  EXPECT_EQ(control_rounds(1024), 10);
  EXPECT_EQ(control_rounds(1025), 12);
  const Duration small = duration(kModel, plan_of("zero3", 64), {.latency = 1e-3}, {});
  const Duration large = duration(kModel, plan_of("zero3", 4096), {.latency = 1e-3}, {});
  EXPECT_NEAR(small.control, 2 * 6e-3, 1e-12);
  EXPECT_NEAR(large.control, 2 * 12e-3, 1e-12);
}

}  // namespace
}  // namespace plumb

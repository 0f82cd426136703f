// Host messages by rounds between two ranks: what they bring, and how many rounds, messages and bytes they take.
#include "backend/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>

#include "plumb/error.h"
#include "watch/wire.h"
#include "world/group.h"

namespace plumb {
namespace {

const Where kWhere{Where::Kind::setup, 0, 0, "a test"};

int64_t log2_up(int ranks) { return std::bit_width(static_cast<unsigned>(ranks - 1)); }

Wire::Count control_of(const World& world) { return wire_counts(world)[static_cast<size_t>(Cargo::control)]; }

class HostMessages : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HostMessages, ::testing::Values(2, 3, 4, 5, 6, 7, 8, 13, 16, 32, 64));

TEST_P(HostMessages, ExchangeBringsEverybodysInLogarithmicRounds) {
  const int ranks = GetParam();
  run_local(ranks, [&](World world) {
    for (const int64_t length : {1, 5, 300}) {
      std::vector<int64_t> mine;
      for (int64_t i = 0; i < length; ++i) mine.push_back(1000 * world.rank() + i);
      const Wire::Count before = control_of(world);
      const auto all = exchange(world, mine, kWhere);
      const Wire::Count more = control_of(world) - before;
      ASSERT_EQ(all.size(), static_cast<size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        ASSERT_EQ(all[r].size(), mine.size());
        for (int64_t i = 0; i < length; ++i) EXPECT_EQ(all[r][i], 1000 * r + i);
      }
      EXPECT_EQ(more.rounds, log2_up(ranks));
      EXPECT_EQ(more.waits, 1);
      EXPECT_EQ(more.bytes, 8 * length * (ranks - 1));
    }
  });
}

// Sums that depend on their order: every rank has the same bits.
TEST_P(HostMessages, CombineTellsAnyEveryAndSumsInABoundedMessage) {
  const int ranks = GetParam();
  std::mutex mutex;
  std::vector<std::vector<double>> sums;
  run_local(ranks, [&](World world) {
    const int rank = world.rank();
    const std::vector<int64_t> bits = {int64_t{1} << (rank % 60), ~(int64_t{1} << (rank % 60)), 42, -1};
    const std::vector<double> numbers = {std::pow(1.7, rank % 40) / 3, 1.0};
    const Wire::Count before = control_of(world);
    const Group::Combined all = control_group(world).combine(bits, numbers, kWhere);
    const Wire::Count more = control_of(world) - before;
    int64_t any = 0;
    double plain = 0;
    for (int r = 0; r < ranks; ++r) {
      any |= int64_t{1} << (r % 60);
      plain += std::pow(1.7, r % 40) / 3;
    }
    EXPECT_EQ(all.any[0], any);
    EXPECT_EQ(all.every[0], ranks == 1 ? any : 0);
    EXPECT_EQ(all.any[1], -1);
    EXPECT_EQ(all.every[1], ~any);
    EXPECT_EQ(all.any[2], 42);
    EXPECT_EQ(all.every[2], 42);
    EXPECT_EQ(all.any[3], -1);
    EXPECT_EQ(all.every[3], -1);
    EXPECT_NEAR(all.sums[0], plain, 1e-12 * plain);
    EXPECT_EQ(all.sums[1], ranks);
    EXPECT_LE(more.rounds, log2_up(ranks) + 1);
    EXPECT_EQ(more.waits, 1);
    EXPECT_LE(more.bytes, (2 * 4 + 2) * 8 * (log2_up(ranks) + 1));
    std::lock_guard lock(mutex);
    sums.push_back(all.sums);
  });
  for (const auto& one : sums) EXPECT_EQ(one, sums[0]);
}

TEST_P(HostMessages, GatherFillsEveryWholeWithOneMessageToEachRank) {
  const int ranks = GetParam();
  run_local(ranks, [&](World world) {
    Group group = control_group(world);
    ASSERT_TRUE(group.names_gathers());
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{7}, std::vector<int64_t>{3, 1, 20}, std::vector<int64_t>{2, 0, 5}}) {
      std::vector<Group::Part> parts;
      for (const int64_t size : sizes) {
        parts.push_back({at::full({size}, world.rank() + 0.5), at::empty({size * ranks})});
      }
      const auto before = wire_counts(world)[static_cast<size_t>(Cargo::gather)];
      group.gather(parts, 5).wait(kWhere);
      const auto more = wire_counts(world)[static_cast<size_t>(Cargo::gather)] - before;
      EXPECT_EQ(more.rounds, 1);
      EXPECT_EQ(more.messages, ranks - 1);
      for (size_t i = 0; i < parts.size(); ++i) {
        const at::Tensor rows = parts[i].full.view({ranks, sizes[i]});
        for (int r = 0; r < ranks; ++r) EXPECT_TRUE(rows[r].eq(r + 0.5).all().item<bool>());
      }
    }
  });
}

// ---- what differs

// The same size, at the same moment: nobody gets the other's memory.
TEST(Messages, RanksThatGatherDifferentThingsAreToldBoth) {
  std::atomic<int> filled{0};
  try {
    run_local(3, [&](World world) {
      Group group = control_group(world);
      const at::Tensor mine = at::full({4}, world.rank()), all = at::full({12}, -1);
      const bool other = world.rank() == 2;
      try {
        group.gather({{mine, all}}, other ? 8 : 7)
            .wait({Where::Kind::backward, 1, 2, other ? "gathering the second" : "gathering the first"});
        ++filled;
      } catch (const Error&) {
        EXPECT_FALSE(other && all.narrow(0, 0, 4).eq(0).all().item<bool>()) << "another's memory came";
        throw;
      }
    });
    FAIL() << "different things were gathered";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("the first"), ::testing::HasSubstr("the second"),
                                               ::testing::HasSubstr("use the same units on every rank")));
  }
  EXPECT_EQ(filled.load(), 0);
}

TEST(Messages, AnExchangeOfOtherLengthIsAnErrorThatSaysBothPlaces) {
  try {
    run_local(2, [&](World world) {
      const std::vector<int64_t> mine(world.rank() == 0 ? 3 : 300);
      exchange(world, mine, {Where::Kind::step, 4, 1, world.rank() == 0 ? "the small one" : "the large one"});
    });
    FAIL() << "messages of different lengths were exchanged";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                ::testing::AllOf(::testing::HasSubstr("the small one"), ::testing::HasSubstr("the large one")));
  }
}

TEST(Messages, AGatherThatARankNeverComesToEndsWithItsPlace) {
  try {
    run_local(2, [&](World world) {
      if (world.rank() == 0) {
        Group group = control_group(world);
        const at::Tensor mine = at::zeros({4}), all = at::zeros({8});
        group.gather({{mine, all}}, 7).wait({Where::Kind::backward, 1, 2, "gathering the first"});
      } else {
        const int64_t word = 1;
        exchange(world, std::span(&word, 1), {Where::Kind::step, 1, 2, "facts"});
      }
    });
    FAIL() << "a gather of one rank ended";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                ::testing::AllOf(::testing::HasSubstr("gathering the first"), ::testing::HasSubstr("facts")));
  }
}

// ---- a link that is slower

TEST(Shape, AMessageTakesItsLatencyInEveryRoundAndItsBytesTakeTurns) {
  setenv("PLUMB_SHAPE", "latency=20ms,gbps=0.008", 1);  // 1 byte per microsecond
  run_local(4, [&](World world) {
    const int64_t word = world.rank();
    const auto begin = std::chrono::steady_clock::now();
    exchange(world, std::span(&word, 1), kWhere);
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(40));
    const at::Tensor all = at::ones({20'000});  // a ring of 4 sends 120,000 bytes, in 6 rounds
    const auto reduced = std::chrono::steady_clock::now();
    data_group(world).all_reduce(all).wait(kWhere);
    EXPECT_GE(std::chrono::steady_clock::now() - reduced, std::chrono::milliseconds(240));
    EXPECT_TRUE(all.eq(4).all().item<bool>());
  });
  unsetenv("PLUMB_SHAPE");
}

}  // namespace
}  // namespace plumb

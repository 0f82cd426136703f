// Ranks that are threads: each runs once with its own number, the first true error comes out, and clocks are compared.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "plumb/error.h"
#include "plumb/world.h"
#include "world/clock.h"
#include "world/group.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(RunLocal, RunsTheBodyOnceForEveryRank) {
  for (int size = 1; size <= 5; ++size) {
    std::mutex mutex;
    std::multiset<int> ranks;
    run_local(size,
              [&](World world) {
                EXPECT_EQ(world.size(), size);
                EXPECT_EQ(world.backend(), "local");
                EXPECT_EQ(world.timeout(), std::chrono::milliseconds(1234));
                EXPECT_EQ(world.local_rank(), world.rank());
                world.barrier();
                std::lock_guard lock(mutex);
                ranks.insert(world.rank());
              },
              {.timeout = std::chrono::milliseconds(1234)});
    std::multiset<int> all;
    for (int r = 0; r < size; ++r) all.insert(r);
    EXPECT_EQ(ranks, all);
  }
}

TEST(RunLocal, RefusesWhatNoWorldCanBe) {
  const auto nothing = [](World) { ADD_FAILURE() << "it ran"; };
  for (const int ranks : {0, -1}) {
    EXPECT_EQ(thrown_by([&] { run_local(ranks, nothing); }),
              "plumb: run_local with " + std::to_string(ranks) + " ranks; at least 1 is needed");
  }
  for (const int size : {1, 2}) {
    for (const int time : {0, -3}) {
      EXPECT_EQ(thrown_by([&] { run_local(size, nothing, {.timeout = std::chrono::milliseconds(time)}); }),
                "plumb: a time-out of " + std::to_string(time) + " ms; it must be positive");
    }
  }
}

// Not what another rank was told because of it.
TEST(RunLocal, ThrowsTheErrorThatBeganIt) {
  for (int size = 1; size <= 4; ++size) {
    for (int failing = 0; failing < size; ++failing) {
      const std::string said = thrown_by([&] {
        run_local(size, [&](World world) {
          if (world.rank() == failing) throw std::runtime_error("rank " + std::to_string(failing) + " had enough");
          world.barrier();
        });
      });
      EXPECT_EQ(said, "rank " + std::to_string(failing) + " had enough");
    }
  }
  // Of what is no std::exception the others hear all the same.
  try {
    run_local(2, [](World world) {
      if (world.rank() == 1) throw 7;
      EXPECT_THAT(thrown_by([&] { world.barrier(); }), HasSubstr("an exception that is no std::exception"));
    });
    FAIL();
  } catch (int seven) {
    EXPECT_EQ(seven, 7);
  }
}

// Whoever waits along an axis knows the others by their numbers in the world, as everybody else does.
TEST(RunLocal, NamesTheRanksOfAnAxisAsTheWorldDoes) {
  for (const bool throws : {true, false}) {
    for (const int gone : {0, 1, 2, 3}) {
      for (const bool shard : {true, false}) {
        const int other = shard ? gone ^ 1 : gone ^ 2;
        std::string heard;
        thrown_by([&] {
          run_local(4, [&](World world) {
            Groups groups = new_groups(world, {2, 2});
            if (world.rank() == gone && throws) throw std::runtime_error("had enough");
            if (world.rank() != other) return;
            at::Tensor mine = at::ones({3});
            heard = thrown_by([&] { (shard ? groups.shard : groups.replicate).all_reduce(mine).wait({}); });
          });
        });
        EXPECT_THAT(heard, HasSubstr("rank " + std::to_string(other) + ": "));
        EXPECT_THAT(heard, HasSubstr("rank " + std::to_string(gone)));
        for (int r = 0; r < 4; ++r) {
          if (r == gone || r == other) continue;
          EXPECT_THAT(heard, Not(HasSubstr("rank " + std::to_string(r)))) << gone << " and " << other;
        }
      }
    }
  }
}

// Threads have one clock: what is said of rank 0's moment is that moment, but for the error that is said.
TEST(CommonOrigin, IsRankZerosMomentAsNearAsItSays) {
  const auto base = std::chrono::steady_clock::now();
  for (int turn = 0; turn < 20; ++turn) {
    for (const int size : {1, 2, 3}) {
      run_local(size, [&](World world) {
        const auto mine = base + std::chrono::hours(3 * world.rank());  // only rank 0's counts
        const Origin origin = common_origin(world, mine);
        const auto off = origin.moment > base ? origin.moment - base : base - origin.moment;
        EXPECT_LE(off, origin.error);
        EXPECT_LT(origin.error, std::chrono::seconds(60));
        EXPECT_EQ(origin.error == origin.error.zero() && off == off.zero(), world.rank() == 0) << "the others estimate";
      });
    }
  }
}

}  // namespace
}  // namespace plumb

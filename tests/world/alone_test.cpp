// Ranks that are threads, down to one; and the clock that they share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "plumb/error.h"
#include "world/clock.h"
#include "world/group.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(RanksOfThreads, OneAloneIsTheCallersThread) {
  int calls = 0;
  run_local(1,
            [&](World world) {
              ++calls;
              EXPECT_EQ(world.rank(), 0);
              EXPECT_EQ(world.size(), 1);
              EXPECT_EQ(world.timeout(), milliseconds(1234));
              world.barrier();
              const std::vector<int64_t> mine{7, 8};
              EXPECT_THAT(exchange(world, mine, {}), ::testing::ElementsAre(mine));
              EXPECT_THAT(exchange_text(world, "a text", {}), ::testing::ElementsAre("a text"));
            },
            {.timeout = milliseconds(1234)});
  EXPECT_EQ(calls, 1);
  EXPECT_THROW(run_local(1, [](World) { throw std::logic_error("enough"); }), std::logic_error);
}

TEST(RanksOfThreads, AreAsManyAsWereAskedForEachOnce) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<std::atomic<int>> seen(ranks);
    run_local(ranks, [&](World world) {
      EXPECT_EQ(world.size(), ranks);
      ++seen[world.rank()];
    });
    for (const auto& one : seen) EXPECT_EQ(one, 1);
  }
  for (const int none : {0, -1}) {
    EXPECT_THAT([&] { run_local(none, [](World) {}); }, ThrowsMessage<Error>(HasSubstr("at least 1 is needed")));
  }
  for (const int64_t never : {0, -5}) {
    for (const int ranks : {1, 2}) {
      EXPECT_THAT([&] { run_local(ranks, [](World) {}, {.timeout = milliseconds(never)}); },
                  ThrowsMessage<Error>(HasSubstr("must be positive")));
    }
  }
}

// What a rank threw first is what the caller gets, and not what others made of it.
TEST(RanksOfThreads, TheCauseIsThrownAndNotItsConsequence) {
  for (int bad = 0; bad < 3; ++bad) {
    EXPECT_THAT(
        [&] {
          run_local(3, [&](World world) {
            if (world.rank() == bad) throw std::runtime_error("rank " + std::to_string(bad) + " had enough");
            world.barrier();
          });
        },
        ThrowsMessage<std::runtime_error>("rank " + std::to_string(bad) + " had enough"));
  }
}

// Threads have one clock: rank 0's moment is found within the error that is said, wherever the others began.
TEST(Clock, FindsRankZerosMomentWithinItsError) {
  for (const int ranks : {1, 2, 4}) {
    Timeline::Moment first;
    run_local(ranks, [&](World world) {
      const Timeline::Moment mine =
          std::chrono::steady_clock::now() - std::chrono::seconds(world.rank() == 0 ? 100 : 3 * world.rank());
      if (world.rank() == 0) first = mine;
      if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(5));  // comes late to the first meeting
      const Origin found = common_origin(world, mine);
      world.barrier();
      EXPECT_GE(found.error, nanoseconds(0));
      EXPECT_LT(found.error, std::chrono::seconds(1));
      const auto away = found.moment > first ? found.moment - first : first - found.moment;
      EXPECT_LE(away, found.error) << "rank " << world.rank() << " of " << ranks;
      if (world.rank() == 0) {
        EXPECT_EQ(found.moment, first);
        EXPECT_EQ(found.error, nanoseconds(0));
      }
    });
  }
}

}  // namespace
}  // namespace plumb

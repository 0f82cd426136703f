// What communication costs, counted; the link that trials make slower; the timeline of a rank.
#include "watch/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <latch>
#include <thread>

#include "plumb/error.h"
#include "plumb/world.h"
#include "watch/timeline.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

TEST(Shape, IsRead) {
  const Shape both = read_shape("latency=1.5ms,gbps=10");
  EXPECT_EQ(both.latency.count(), 1'500'000);
  EXPECT_EQ(both.gbps, 10);
  EXPECT_EQ(read_shape("latency=20us").latency.count(), 20'000);
  EXPECT_EQ(read_shape("latency=2s").latency.count(), 2'000'000'000);
  EXPECT_EQ(read_shape("latency=100s").latency.count(), 100'000'000'000);
  EXPECT_EQ(read_shape("").gbps, 0);
  for (const char* wrong : {"latency=1", "latency=ms", "latency=-1ms", "gbps=0", "gbps=fast", "speed=3", "gbps",
                            "latency=1h", "latency=101s", "gbps=0.00009", "gbps=10ms", "gbps=nan", "latency=infs"}) {
    try {
      read_shape(wrong);
      ADD_FAILURE() << wrong;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("latency=1ms")) << wrong;
    }
  }
}

TEST(Wire, CountsByKindAndTellsWhatCameSince) {
  Wire wire;
  EXPECT_FALSE(wire.shaped());
  wire.sent(Cargo::data, 2, 3, 100);
  wire.sent(Cargo::control, 1, 1, 8);
  const Wire::Counts before = wire.counts();
  wire.sent(Cargo::data, 5, 7, 11);
  wire.waited(Cargo::data, true);
  wire.waited(Cargo::data, false);
  wire.waited(Cargo::gather, false);
  const Wire::Counts now = wire.counts();
  const auto since = [&](Cargo cargo) { return now[static_cast<size_t>(cargo)] - before[static_cast<size_t>(cargo)]; };
  EXPECT_EQ(now[0].rounds, 7);
  EXPECT_EQ(now[0].messages, 10);
  EXPECT_EQ(now[0].bytes, 111);
  EXPECT_EQ(since(Cargo::data).rounds, 5);
  EXPECT_EQ(since(Cargo::data).messages, 7);
  EXPECT_EQ(since(Cargo::data).bytes, 11);
  EXPECT_EQ(since(Cargo::data).waits, 2);
  EXPECT_EQ(since(Cargo::data).blocked, 1);
  EXPECT_EQ(since(Cargo::control).bytes, 0);
  EXPECT_EQ(since(Cargo::gather).waits, 1);
  EXPECT_EQ(since(Cargo::gather).blocked, 0);
  EXPECT_EQ(since(Cargo::store).messages, 0);
}

// Rounds each take the latency; bytes of several messages take turns.
TEST(Wire, ThatIsShapedArrivesLater) {
  setenv("PLUMB_SHAPE", "latency=20s,gbps=0.0001",
         1);  // 12.5 bytes per millisecond: far above what a busy machine adds
  Wire wire;
  unsetenv("PLUMB_SHAPE");
  EXPECT_TRUE(wire.shaped());
  const auto begin = std::chrono::steady_clock::now();
  const auto first = wire.arrival(3, 125'000), second = wire.arrival(0, 62'500), third = wire.arrival(1, 0);
  const auto late = std::chrono::steady_clock::now() - begin;
  const auto near = [&](Wire::Moment moment, milliseconds expected) {
    EXPECT_GE(moment - begin, expected);
    EXPECT_LE(moment - begin, expected + late);
  };
  near(first, milliseconds(70'000));
  near(second, milliseconds(15'000));
  near(third, milliseconds(35'000));
  Wire plain;
  const auto at_once = plain.arrival(100, 1'000'000'000);
  EXPECT_LE(at_once, std::chrono::steady_clock::now());
}

// Whoever sends: the link is as long in use as all bytes together take.
TEST(Wire, MessagesOfSeveralThreadsTakeTurns) {
  setenv("PLUMB_SHAPE", "gbps=0.008", 1);  // a byte per microsecond
  Wire wire;
  unsetenv("PLUMB_SHAPE");
  constexpr int64_t threads = 4, messages = 300'000, bytes = 1'000;
  std::latch together(threads);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> all;
  for (int64_t i = 0; i < threads; ++i) {
    all.emplace_back([&] {
      together.arrive_and_wait();
      for (int64_t sent = 0; sent < messages; ++sent) (void)wire.arrival(1, bytes);
    });
  }
  for (std::thread& one : all) one.join();
  EXPECT_GE(wire.arrival(0, 0) - begin, std::chrono::microseconds(threads * messages * bytes));
}

TEST(Timeline, KeepsWhatHappensWhileItIsOn) {
  Timeline timeline;
  timeline.span("a", "before", {});
  timeline.mark("a", "before");
  EXPECT_TRUE(timeline.events().empty());
  timeline.start();
  timeline.start();  // by somebody else
  const auto begin = std::chrono::steady_clock::now();
  timeline.span("a", "one", begin, begin + milliseconds(3));
  timeline.mark("b", "two");
  {
    const Timeline::Scope scope(timeline, "c", [] { return "three"; });
  }
  timeline.stop();
  ASSERT_EQ(timeline.events().size(), 3u) << "the other still wants it";
  const auto events = timeline.events();
  EXPECT_EQ(events[0].name, "one");
  EXPECT_EQ(events[0].end - events[0].begin, milliseconds(3));
  EXPECT_EQ(events[1].end, events[1].begin);
  EXPECT_STREQ(events[2].track, "c");
  EXPECT_LE(events[2].begin, events[2].end);
  timeline.stop();
  EXPECT_FALSE(timeline.on());
  EXPECT_TRUE(timeline.events().empty());
  bool named = false;
  {
    const Timeline::Scope scope(timeline, "c", [&] { return named = true, "four"; });
  }
  EXPECT_FALSE(named) << "names are made only while it is on";
}

TEST(Timeline, AProgramIsAlwaysAtSomething) {
  Timeline timeline;
  timeline.enter(doing::step);
  timeline.start();
  const auto begin = std::chrono::steady_clock::now();
  timeline.enter(doing::backward, begin + milliseconds(10));
  timeline.enter(doing::backward, begin + milliseconds(12));  // of another engine
  timeline.enter(doing::step, begin + milliseconds(15));
  timeline.enter(doing::forward, begin + milliseconds(15));
  timeline.enter(doing::step, begin + milliseconds(30));
  std::vector<std::string> names;
  std::vector<int64_t> lengths;
  for (const Timeline::Event& event : timeline.events()) {
    EXPECT_STREQ(event.track, tracks::program);
    names.push_back(event.name);
    lengths.push_back(std::chrono::round<milliseconds>(event.end - begin).count());
  }
  EXPECT_EQ(names, (std::vector<std::string>{doing::forward, doing::backward, doing::forward}));
  EXPECT_EQ(lengths, (std::vector<int64_t>{10, 15, 30}));
}

// Somebody else's trace that begins meanwhile changes nothing in what the first one sees.
TEST(Timeline, ASecondOneThatBeginsIsNotSeenInTheFirst) {
  Timeline timeline;
  timeline.start();
  const auto begin = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(milliseconds(2));
  timeline.start();
  timeline.enter(doing::backward, begin + milliseconds(100));
  timeline.start();
  timeline.enter(doing::step, begin + milliseconds(200));
  const auto events = timeline.events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, doing::forward);
  EXPECT_LE(events[0].begin, begin) << "since the first began";
  EXPECT_EQ(events[1].name, doing::backward);
  EXPECT_EQ(events[1].begin, begin + milliseconds(100));
}

// Engines on several threads may say out of order when they began: a program is at one thing at a time all the same.
RC_GTEST_PROP(Timeline, WhateverAProgramEntersItsSpansFollowUponEachOther, ()) {
  Timeline timeline;
  timeline.start();
  const auto begin = std::chrono::steady_clock::now();
  auto latest = Timeline::Moment{};
  for (const int after : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 50))) {
    const char* what = *rc::gen::element(doing::forward, doing::backward, doing::step, doing::optimizer);
    timeline.enter(what, begin + milliseconds(after));
    latest = std::max(latest, begin + milliseconds(after));
  }
  const auto events = timeline.events();
  for (size_t i = 0; i < events.size(); ++i) {
    RC_ASSERT(events[i].begin < events[i].end);
    RC_ASSERT(events[i].end <= latest);
    if (i > 0) RC_ASSERT(events[i].begin >= events[i - 1].end);
  }
}

}  // namespace
}  // namespace plumb

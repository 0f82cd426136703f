// A relay: what follows collectives, in their order, and the end of what has not ended.
#include "backend/relay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

namespace plumb {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Ends when it is told to.
struct Held final : c10d::Work {
  bool wait(milliseconds limit) override {
    if (ended.get_future().wait_for(limit) != std::future_status::ready) {
      ended = {};
      throw std::runtime_error("a slice is over");
    }
    return true;
  }
  bool isCompleted() override { return false; }
  std::promise<void> ended;
};

std::string text_of(const std::exception_ptr& failure) {
  if (!failure) return "well";
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// However many wait behind the first, and whether the thread has begun it or not.
TEST(Relay, ThatStopsEndsEverythingThatWasUnderWay) {
  for (const int calls : {1, 2, 5}) {
    for (const bool begun : {false, true}) {
      std::vector<std::string> ends(calls);
      Relay relay("plumb_test");
      std::promise<void> running;
      if (begun) relay.after({}, [&](const std::exception_ptr&) { running.set_value(); });
      for (int i = 0; i < calls; ++i) {
        relay.after({c10::make_intrusive<Held>()},
                    [&ends, i](const std::exception_ptr& failure) { ends[i] = text_of(failure); });
      }
      if (begun) running.get_future().wait();
      relay.stop();
      std::string late;
      relay.after({c10::make_intrusive<Held>()}, [&](const std::exception_ptr& failure) { late = text_of(failure); });
      for (const std::string& end : ends) EXPECT_THAT(end, HasSubstr("closed before this collective ended"));
      EXPECT_THAT(late, HasSubstr("closed before this collective ended"));
    }
  }
}

TEST(Relay, DoesWhatFollowsInTheOrderOfTheCalls) {
  std::vector<int> done;
  std::promise<void> all;
  Relay relay("plumb_test");
  for (int i = 0; i < 20; ++i) {
    relay.after({}, [&, i](const std::exception_ptr& failure) {
      EXPECT_EQ(failure, nullptr);
      done.push_back(i);
      if (i == 19) all.set_value();
    });
  }
  all.get_future().wait();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(done.at(i), i);
}

}  // namespace
}  // namespace plumb

// A relay: what follows collectives, in their order, and the end of what has not ended.
#include "backend/relay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <memory>

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

// Of several, whichever fails; what follows hears of it once all have ended that came before.
TEST(Relay, TellsWhatFailedOfSeveral) {
  struct Ended final : c10d::Work {
    explicit Ended(bool well) { finish(well ? nullptr : std::make_exception_ptr(std::runtime_error("it is broken"))); }
  };
  Relay relay("plumb_test");
  for (int works = 1; works <= 3; ++works) {
    for (int broken = -1; broken < works; ++broken) {
      Relay::Works all;
      for (int i = 0; i < works; ++i) all.push_back(c10::make_intrusive<Ended>(i != broken));
      std::promise<std::string> told;
      relay.after(std::move(all), [&](const std::exception_ptr& failure) { told.set_value(text_of(failure)); });
      EXPECT_THAT(told.get_future().get(), HasSubstr(broken < 0 ? "well" : "it is broken"))
          << broken << " of " << works;
    }
  }
}

// Its thread is not there: letting go waits for nobody, and the parent's goes on.
TEST(Relay, IsLeftToItsParentByAForkedProcess) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that lets go of its parent's thread";
#endif
  auto relay = std::make_unique<Relay>("plumb_test");
  for (int i = 0; i < 5; ++i) {
    std::promise<void> done;
    relay->after({}, [&](const std::exception_ptr&) { done.set_value(); });
    done.get_future().wait();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      relay.reset();
      ::_exit(7);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  }
}

}  // namespace
}  // namespace plumb

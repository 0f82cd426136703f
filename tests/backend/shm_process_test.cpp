// Worlds of processes over shared memory: that it is chosen where it can be, and what is said when a rank goes astray.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <random>
#include <set>

#include "world/support/processes.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<Process> on_shm(const std::string& role, int size, Variables variables = {}) {
  variables["PLUMB_TEST_BACKEND"] = "shm";
  return start_ranks(role, size, variables);
}

void expect_all_done(std::vector<Process> ranks) {
  for (auto& rank : ranks) EXPECT_EQ(rank.join(std::chrono::seconds(180)), 0) << rank.output();
}

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path());
  return names;
}

TEST(ShmProcesses, CarryEveryVerb) {
  for (int size : {2, 3, 4}) expect_all_done(on_shm("verbs", size));
}

TEST(ShmProcesses, CarryEveryDtypeInSharedAndOrdinaryMemory) {
  for (int size : {2, 4}) expect_all_done(on_shm("drill", size));
}

TEST(ShmProcesses, CarryRandomSequencesOverTwoGroups) {
  const std::string seed = std::to_string(std::random_device()() >> 1);
  SCOPED_TRACE("PLUMB_TEST_SEED " + seed);
  for (int size : {2, 3, 4}) expect_all_done(on_shm("soak", size, {{"PLUMB_TEST_SEED", seed}}));
}

TEST(ShmProcesses, ReadWhatARankSharedAfterItLetGo) {
  expect_all_done(on_shm("rank 1 lets go first", 3));
  expect_all_done(start_ranks("rank 1 lets go first", 2, {{"PLUMB_TEST_BACKEND", "gloo"}}));
}

TEST(ShmProcesses, HoldNoTensorWhoseCollectiveHasEnded) {
  expect_all_done(on_shm("hold nothing", 3));
  expect_all_done(start_ranks("hold nothing", 2, {{"PLUMB_TEST_BACKEND", "gloo"}}));
}

TEST(ShmProcesses, CombineFactsOverEveryBackend) {
  expect_all_done(on_shm("combine", 3));
  for (const char* backend : {"gloo", "tcp"}) {
    expect_all_done(start_ranks("combine", 3, {{"PLUMB_TEST_BACKEND", backend}}));
  }
}

TEST(ShmProcesses, ReadNothingInPlaceWhereOneHasNoRoomForIt) { expect_all_done(on_shm("rank 1 has little room", 3)); }

TEST(ShmProcesses, ReadInPlaceAlongAnAxis) {
  expect_all_done(on_shm("axes", 4));
  expect_all_done(start_ranks("axes", 4, {{"PLUMB_TEST_BACKEND", "tcp"}}));
}

TEST(ShmProcesses, LeaveToARankWhatTheyInheritedFromIt) { expect_all_done(on_shm("fork", 2)); }

TEST(ShmProcesses, MayJoinTwice) { expect_all_done(on_shm("two worlds", 2)); }

TEST(ShmProcesses, AreTheChoiceOnOneMachine) {
  auto ranks = start_ranks("verbs", 2);
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 0);
    EXPECT_THAT(rank.output(), HasSubstr("over shm"));
  }
}

TEST(ShmProcesses, TakeGlooWhenAnyOfThemAsksForIt) {
  const Port port;
  std::vector<Process> ranks;
  for (int r = 0; r < 2; ++r) {
    Variables variables = at_port(port, r, 2);
    if (r == 1) variables["PLUMB_TEST_BACKEND"] = "gloo";
    ranks.emplace_back("verbs", variables);
  }
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 0) << rank.output();
    EXPECT_THAT(rank.output(), HasSubstr("over gloo"));
  }
}

TEST(ShmProcesses, ThatAskForDifferentBackendsAreToldBoth) {
  const Port port;
  std::vector<Process> ranks;
  for (int r = 0; r < 2; ++r) {
    Variables variables = at_port(port, r, 2);
    variables["PLUMB_TEST_BACKEND"] = r == 0 ? "shm" : "gloo";
    ranks.emplace_back("verbs", variables);
  }
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 3) << rank.output();
    EXPECT_THAT(rank.output(), HasSubstr("rank 0 asked for backend 'shm' and rank 1 for 'gloo'"));
  }
}

// A rank that numbers processes otherwise cannot open the others' memory.
TEST(ShmProcesses, FallBackToTcpTogetherWhenOneCannotShare) {
  if (geteuid() != 0) GTEST_SKIP() << "making a process namespace takes root";
  if (std::system("unshare --pid --fork true >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "this machine does not allow `unshare --pid`";
  }
  for (const std::string asked : {"", "shm"}) {
    const Port port;
    std::vector<Process> ranks;
    for (int r = 0; r < 3; ++r) {
      Variables variables = at_port(port, r, 3);
      variables["PLUMB_TEST_BACKEND"] = asked;
      ranks.emplace_back("verbs", variables,
                         r == 1 ? std::vector<std::string>{"unshare", "--pid", "--fork"} : std::vector<std::string>{});
    }
    for (auto& rank : ranks) {
      EXPECT_EQ(rank.join(), asked.empty() ? 0 : 3) << rank.output();
      if (asked.empty()) {
        EXPECT_THAT(rank.output(), HasSubstr("over tcp"));
      } else {
        EXPECT_THAT(rank.output(), AllOf(HasSubstr("backend 'shm'"), HasSubstr("another process namespace"),
                                         HasSubstr("choose 'tcp'")));
      }
    }
  }
}

TEST(ShmProcesses, NameAKilledRankWithinSeconds) {
  for (const std::string role : {"reduce for ever", "reduce much for ever", "gather for ever", "rank 1 stays away"}) {
    auto ranks = on_shm(role, 3);
    for (int r = 0; r < 3; ++r) {
      if (role != "rank 1 stays away" || r == 1) {
        ASSERT_TRUE(ranks[r].wait_for("READY")) << ranks[r].output();
      }
    }
    SCOPED_TRACE(role);
    expect_named_when_killed(ranks, 1, 8, "rank 1 is gone: its process was killed");
  }
}

TEST(ShmProcesses, NameARankThatWasKilledAfterItCame) {
  auto ranks = on_shm("rank 1 dies in a gather", 3);
  for (const int r : {0, 2}) {
    EXPECT_EQ(ranks[r].join(), 3) << ranks[r].output();
    EXPECT_THAT(ranks[r].output(), HasSubstr("rank 1 is gone: its process was killed"));
  }
}

TEST(ShmProcesses, NameAKilledRankZeroThoughTheStoreDiesWithIt) {
  auto ranks = on_shm("reduce for ever", 3);
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  expect_named_when_killed(ranks, 0, 15, "rank 0 is gone");
}

TEST(ShmProcesses, NameAStoppedRankAtTheTimeOut) {
  for (const std::string role : {"reduce for ever", "gather for ever"}) {
    auto ranks = on_shm(role, 2, {{"PLUMB_TEST_TIMEOUT_MS", "2500"}});
    for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
    ranks[1].signal(SIGSTOP);
    EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
    EXPECT_THAT(ranks[0].output(), AllOf(HasSubstr("rank 1 "), HasSubstr("last heard of")));
    ranks[1].signal(SIGKILL);
  }
}

TEST(ShmProcesses, NameARankThatStaysAwayAtTheTimeOut) {
  auto ranks = on_shm("rank 1 stays away", 3, {{"PLUMB_TEST_TIMEOUT_MS", "2000"}});
  for (int r : {0, 2}) {
    EXPECT_EQ(ranks[r].join(), 3) << ranks[r].output();
    EXPECT_THAT(ranks[r].output(), AllOf(HasSubstr("rank 1 did not come"), HasSubstr("runs outside any collective")));
  }
}

TEST(ShmProcesses, ThatWaitForEachOtherInDifferentPlacesAreToldBothPlaces) {
  auto ranks = on_shm("crossed", 3);
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 3) << rank.output();
    EXPECT_THAT(rank.output(),
                AllOf(HasSubstr("is in backward 2 of step 5"), HasSubstr("called step() after 1 backward")));
  }
}

TEST(ShmProcesses, ThatCallDifferentCollectivesAreToldBoth) {
  auto ranks = on_shm("different collectives", 3);
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 3) << rank.output();
    EXPECT_THAT(rank.output(), AllOf(HasSubstr("rank 0 called all_reduce(sum) of 64 Float"),
                                     HasSubstr("rank 1 called broadcast from rank 0 of 64 Float")));
  }
}

TEST(ShmProcesses, NameARankThatLeavesEarly) {
  auto ranks = on_shm("rank 1 leaves", 2);
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), AllOf(HasSubstr("rank 1"), HasSubstr("left the world"), HasSubstr("step 7")));
  EXPECT_EQ(ranks[1].join(), 0) << ranks[1].output();
}

TEST(ShmProcesses, NameARankWhoseProgramThrowsOrReports) {
  auto ranks = on_shm("rank 1 throws", 2);
  EXPECT_EQ(ranks[1].join(), 4) << ranks[1].output();
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), HasSubstr("rank 1 failed: its program was ended by an exception"));
  ranks = on_shm("rank 1 reports", 2);
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), HasSubstr("rank 1 failed: parameter 'w' was delivered twice"));
}

TEST(ShmProcesses, MayLeaveWithWorkPending) { expect_all_done(on_shm("leave with work pending", 2)); }

TEST(ShmProcesses, LeaveNothingBehindWhenAllAreKilled) {
  const auto before = shared_files();
  auto ranks = on_shm("reduce much for ever", 3);
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  EXPECT_EQ(shared_files(), before);
  for (auto& rank : ranks) rank.signal(SIGKILL);
  for (auto& rank : ranks) EXPECT_EQ(rank.join(), -SIGKILL);
  EXPECT_EQ(shared_files(), before);
}

}  // namespace
}  // namespace plumb::testing

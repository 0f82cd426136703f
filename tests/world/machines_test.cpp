// Worlds of real processes on several machines with several ranks each: pretended ones, and two ends of a virtual cable.
#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "world/support/cable.h"
#include "world/support/processes.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// So many ranks on each machine, all of them this one.
std::vector<Process> pretended(const std::string& role, int size, const std::string& machines, Variables more = {}) {
  more.emplace("PLUMB_MACHINES", machines);
  return start_ranks(role, size, more);
}

// Two ranks at each end.
std::vector<Process> at_both_ends(const Cable& cable, const std::string& role, Variables more = {}) {
  std::vector<Process> ranks;
  more.emplace("WORLD_SIZE", "4");
  more.emplace("MASTER_ADDR", "10.77.0.1");
  more.emplace("MASTER_PORT", "29500");
  more.emplace("PLUMB_MACHINES", "2");
  for (int r = 0; r < 4; ++r) {
    more["RANK"] = std::to_string(r);
    more["LOCAL_RANK"] = std::to_string(r % 2);
    ranks.emplace_back(role, more, cable.inside(r / 2));
  }
  return ranks;
}

// "1.5" of "all_reduce 1.5 of its bytes".
double told(const std::string& output, const std::string& verb) {
  const size_t at = output.find("\n" + verb + " ");
  return at == std::string::npos ? -1 : std::atof(output.c_str() + at + verb.size() + 2);
}

TEST(MachinesOfProcesses, CarryEveryVerbWhateverTheNumberOfRanksOnEach) {
  const std::vector<std::pair<std::string, std::string>> worlds{{"2", "shm+tcp"}, {"1,2,1", "shm+tcp"}, {"4", "tcp"}};
  for (const auto& [machines, backend] : worlds) {
    auto ranks = pretended("verbs", 4, machines);
    for (auto& rank : ranks) {
      EXPECT_EQ(rank.join(std::chrono::seconds(60)), 0) << machines << ": " << rank.output();
      EXPECT_THAT(rank.output(), HasSubstr("over " + backend + "\n"));
    }
  }
}

TEST(MachinesOfProcesses, AreNoneWhereMemoryMayNotBeShared) {
  auto ranks = pretended("verbs", 4, "2", {{"PLUMB_SHM", "0"}});
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(std::chrono::seconds(60)), 0) << rank.output();
    EXPECT_THAT(rank.output(), HasSubstr("over tcp\n"));
  }
}

TEST(MachinesOfProcesses, HoldNoTensorWhoseCollectiveHasEnded) {
  auto ranks = pretended("hold nothing", 4, "2");
  for (auto& rank : ranks) EXPECT_EQ(rank.join(std::chrono::seconds(60)), 0) << rank.output();
}

TEST(MachinesOfProcesses, LeaveToARankWhatTheyInheritedFromIt) {
  auto ranks = pretended("fork", 3, "1,2");
  for (auto& rank : ranks) EXPECT_EQ(rank.join(std::chrono::seconds(60)), 0) << rank.output();
}

TEST(MachinesOfProcesses, ThatDoNotFitTheWorldAreAnErrorOnEveryRank) {
  for (const char* machines : {"2,3", "two"}) {
    auto ranks = pretended("verbs", 4, machines);
    for (auto& rank : ranks) {
      EXPECT_EQ(rank.join(), 3) << rank.output();
      EXPECT_THAT(rank.output(), HasSubstr(std::string("PLUMB_MACHINES=") + machines + " does not spread"));
    }
  }
}

TEST(MachinesOfProcesses, AKilledRankIsNamedOnEveryOther) {
  for (const int victim : {2, 3}) {  // the first of its machine; another
    auto ranks = pretended("reduce for ever", 4, "2");
    for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
    expect_named_when_killed(ranks, victim, 25, "rank " + std::to_string(victim) + " is gone");
  }
}

TEST(MachinesOfProcesses, AStoppedRankIsAnErrorOnEveryOtherAtTheTimeOut) {
  auto ranks = pretended("reduce for ever", 4, "2", {{"PLUMB_TEST_TIMEOUT_MS", "3000"}});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  ranks[3].signal(SIGSTOP);
  for (const int r : {0, 1, 2}) {
    EXPECT_EQ(ranks[r].join(), 3) << ranks[r].output();
    EXPECT_THAT(ranks[r].output(), HasSubstr("rank 3"));
  }
  ranks[3].signal(SIGKILL);
}

TEST(MachinesOfProcesses, RanksThatGatherDifferentThingsAreToldBothPlaces) {
  auto ranks = pretended("gather astray", 4, "2");
  const auto begin = Clock::now();
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 3) << rank.output();
    EXPECT_THAT(rank.output(), AllOf(HasSubstr("unit a"), HasSubstr("unit b")));
  }
  EXPECT_LT(seconds_since(begin), 30);  // the time-out is 60 s
}

TEST(MachinesOfProcesses, EndAtOnceThoughWorkIsPending) {
  auto ranks = pretended("leave with work pending", 4, "2");
  const auto begin = Clock::now();
  for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
  EXPECT_LT(seconds_since(begin), 20);  // the time-out is 60 s
}

// The network's own count: what one machine must send, not what its ranks have. Without tiers, twice as much crosses.
// What TCP sent again is no stream of ours, and is taken off where there may not be more; only there, as what was dropped
// the first time may not have been counted.
TEST(MachinesOfProcesses, OneStreamPerMachineCrossesTheCable) {
  NEEDS(cable);
  for (const bool tiers : {true, false}) {
    auto ranks = at_both_ends(cable, "cross", tiers ? Variables{} : Variables{{"PLUMB_TEST_BACKEND", "tcp"}});
    for (auto& rank : ranks) EXPECT_EQ(rank.join(std::chrono::seconds(60)), 0) << rank.output();
    const double streams = tiers ? 1 : 2;
    for (const int first : {0, 2}) {
      const std::string& output = ranks[first].output();
      for (const auto& [verb, share] :
           {std::pair{"all_reduce", 1.0}, {"reduce_scatter", 0.5}, {"all_gather", 0.5}, {"gather", 0.5}}) {
        const double crossed = told(output, verb), again = told(output, std::string(verb) + " again");
        EXPECT_GE(crossed, 0.88 * share * streams) << verb << ": " << output;
        EXPECT_LE(crossed - again, 1.12 * share * streams) << verb << ": " << output;
      }
    }
  }
}

TEST(MachinesOfProcesses, APulledCableEndsEveryRankWithinTheTimeOut) {
  NEEDS(cable);
  auto ranks = at_both_ends(cable, "reduce for ever", {{"PLUMB_TEST_TIMEOUT_MS", "6000"}});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  const auto begin = Clock::now();
  cable.pull();
  for (auto& rank : ranks) EXPECT_EQ(rank.join(std::chrono::seconds(60)), 3) << rank.output();
  EXPECT_THAT(ranks[0].output(), AnyOf(HasSubstr("rank 2"), HasSubstr("rank 3")));
  EXPECT_THAT(ranks[3].output(), HasSubstr("the store"));
  EXPECT_LT(seconds_since(begin), 40);
}

}  // namespace
}  // namespace plumb::testing

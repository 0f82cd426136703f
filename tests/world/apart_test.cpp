// Worlds of real processes that share no memory: what works, and what is said when a rank dies, stops, leaves or goes astray.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

#include "world/support/cable.h"
#include "world/support/processes.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// As if each rank had a machine of its own: nothing travels but by TCP.
std::vector<Process> apart(const std::string& role, int size, Variables variables = {}) {
  variables.emplace("PLUMB_TEST_BACKEND", "tcp");
  variables.emplace("PLUMB_SHM", "0");
  return start_ranks(role, size, variables);
}

const Variables kGloo{{"PLUMB_TEST_BACKEND", "gloo"}};
const std::vector<Variables> kBoth{{}, kGloo};

TEST(Apart, EveryVerbIsCarriedBetweenProcesses) {
  for (const Variables& carrier : kBoth) {
    for (int size : {2, 3}) {
      auto ranks = apart("verbs", size, carrier);
      for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
    }
  }
}

// The address of this machine that others would see; empty where it has none.
std::string outer_address() {
  const int fd = ::socket(AF_INET, SOCK_DGRAM, 0);
  sockaddr_in there{}, mine{};
  there.sin_family = AF_INET;
  there.sin_port = htons(9);
  ::inet_pton(AF_INET, "203.0.113.1", &there.sin_addr);
  socklen_t length = sizeof mine;
  char text[INET_ADDRSTRLEN] = "";
  if (::connect(fd, reinterpret_cast<sockaddr*>(&there), sizeof there) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &length) == 0) {
    ::inet_ntop(AF_INET, &mine.sin_addr, text, sizeof text);
  }
  ::close(fd);
  return std::string(text).rfind("127.", 0) == 0 ? "" : text;
}

// Debian's /etc/hosts: some know the way to rank 0 by an address that others reach, some by one that leads to themselves alone.
TEST(Apart, RanksMeetThoughSomeKnowTheirMachineByALoopbackAddress) {
  const std::string outer = outer_address();
  if (outer.empty()) GTEST_SKIP() << "this machine has no address but its own";
  for (const unsigned loopback : {1U, 6U, 5U}) {
    const std::string port = std::to_string(free_port());
    std::vector<Process> ranks;
    for (int r = 0; r < 3; ++r) {
      ranks.emplace_back("verbs", Variables{{"RANK", std::to_string(r)},
                                            {"WORLD_SIZE", "3"},
                                            {"LOCAL_RANK", std::to_string(r)},
                                            {"MASTER_ADDR", (loopback >> r & 1U) != 0 ? "127.0.0.1" : outer},
                                            {"MASTER_PORT", port},
                                            {"PLUMB_TEST_BACKEND", "tcp"},
                                            {"PLUMB_TEST_TIMEOUT_MS", "20000"},
                                            {"PLUMB_SHM", "0"}});
    }
    for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << loopback << ": " << rank.output();
  }
}

TEST(Apart, GlooCarriesEveryVerbBesideMessagesInSharedMemory) {
  auto ranks = apart("verbs", 3, {{"PLUMB_SHM", "1"}, {"PLUMB_TEST_BACKEND", "gloo"}});
  for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
}

TEST(Apart, AProcessMayJoinTwice) {
  auto ranks = apart("two worlds", 2);
  for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
}

TEST(Apart, AKilledRankIsNamedOnEveryOther) {
  for (const Variables& carrier : {Variables{}, Variables{{"PLUMB_SHM", "1"}, {"PLUMB_TEST_BACKEND", "gloo"}}}) {
    auto ranks = apart("reduce for ever", 3, carrier);
    for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
    expect_named_when_killed(ranks, 1, 12, "rank 1 is gone");
  }
}

TEST(Apart, AKilledRankZeroIsNamedThoughTheStoreDiesWithIt) {
  auto ranks = apart("reduce for ever", 3);
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  expect_named_when_killed(ranks, 0, 15, "rank 0 is gone");
}

TEST(Apart, AStoppedRankIsNamedAtTheTimeOut) {
  auto ranks = apart("reduce for ever", 2, {{"PLUMB_TEST_TIMEOUT_MS", "2500"}});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  ranks[1].signal(SIGSTOP);
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), AllOf(HasSubstr("rank 1 did not come"), HasSubstr("last heard of")));
  ranks[1].signal(SIGKILL);
}

TEST(Apart, AStoppedStoreHostHangsNobody) {
  auto ranks = apart("reduce for ever", 2, {{"PLUMB_TEST_TIMEOUT_MS", "2500"}});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  const auto begin = Clock::now();
  ranks[0].signal(SIGSTOP);
  EXPECT_EQ(ranks[1].join(), 3) << ranks[1].output();
  EXPECT_THAT(ranks[1].output(), AllOf(HasSubstr("rank 0"), HasSubstr("the store does not answer")));
  EXPECT_LT(seconds_since(begin), 15);
  ranks[0].signal(SIGKILL);
}

TEST(Apart, ARankThatStaysAwayIsNamedAtTheTimeOut) {
  auto ranks = apart("rank 1 stays away", 3, {{"PLUMB_TEST_TIMEOUT_MS", "2000"}});
  for (int r : {0, 2}) {
    EXPECT_EQ(ranks[r].join(), 3) << ranks[r].output();
    EXPECT_THAT(ranks[r].output(), AllOf(HasSubstr("rank 1 did not come"), HasSubstr("runs outside any collective")));
  }
}

TEST(Apart, RanksThatWaitForEachOtherInDifferentPlacesAreToldBothPlaces) {
  auto ranks = apart("crossed", 3);
  const auto begin = Clock::now();
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.join(), 3) << rank.output();
    EXPECT_THAT(rank.output(), AllOf(HasSubstr("is in backward 2 of step 5"),
                                     HasSubstr("called step() after 1 backward"), HasSubstr("engine.backward(loss)")));
  }
  EXPECT_LT(seconds_since(begin), 20);  // the time-out is 60 s
}

TEST(Apart, ARankThatLeavesEarlyIsNamed) {
  auto ranks = apart("rank 1 leaves", 2);
  const auto begin = Clock::now();
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), AllOf(HasSubstr("rank 1"), HasSubstr("left the world"), HasSubstr("step 7")));
  EXPECT_EQ(ranks[1].join(), 0) << ranks[1].output();
  EXPECT_LT(seconds_since(begin), 20);
}

TEST(Apart, ARankWhoseProgramThrowsIsNamed) {
  auto ranks = apart("rank 1 throws", 2);
  EXPECT_EQ(ranks[1].join(), 4) << ranks[1].output();
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), HasSubstr("rank 1 failed: its program was ended by an exception"));
}

TEST(Apart, AReportedFailureReachesTheOthersWithItsText) {
  auto ranks = apart("rank 1 reports", 3);
  EXPECT_EQ(ranks[1].join(), 4);
  for (int r : {0, 2}) {
    EXPECT_EQ(ranks[r].join(), 3) << ranks[r].output();
    EXPECT_THAT(ranks[r].output(), AllOf(HasSubstr("rank 1"), HasSubstr("parameter 'w' was delivered twice")));
  }
}

TEST(Apart, AWorldEndsAtOnceThoughWorkIsPending) {
  for (const Variables& carrier : kBoth) {
    auto ranks = apart("leave with work pending", 2, carrier);
    const auto begin = Clock::now();
    for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
    EXPECT_LT(seconds_since(begin), 20);  // the time-out is 60 s
  }
}

std::vector<Process> at_both_ends(const Cable& cable, const std::string& role, const Variables& more = {}) {
  std::vector<Process> ranks;
  for (int r = 0; r < 2; ++r) {
    Variables variables{{"RANK", std::to_string(r)},
                        {"WORLD_SIZE", "2"},
                        {"LOCAL_RANK", "0"},
                        {"MASTER_ADDR", "10.77.0.1"},
                        {"MASTER_PORT", "29500"}};
    variables.insert(more.begin(), more.end());
    ranks.emplace_back(role, variables, cable.inside(r));
  }
  return ranks;
}

TEST(Apart, EveryVerbIsCarriedBetweenTwoHosts) {
  NEEDS(cable);
  for (const char* backend : {"tcp", "gloo"}) {
    auto ranks = at_both_ends(cable, "verbs", {{"PLUMB_TEST_BACKEND", backend}, {"PLUMB_SHM", "0"}});
    for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
  }
}

// No packet says that a cable was pulled: both sides find out by themselves, and say what they know.
TEST(Apart, APulledCableEndsBothSidesWithinTheTimeOut) {
  NEEDS(cable);
  auto ranks = at_both_ends(cable, "reduce for ever",
                            {{"PLUMB_TEST_BACKEND", "tcp"}, {"PLUMB_SHM", "0"}, {"PLUMB_TEST_TIMEOUT_MS", "6000"}});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  const auto begin = Clock::now();
  cable.pull();
  EXPECT_EQ(ranks[0].join(std::chrono::seconds(60)), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), AllOf(HasSubstr("rank 1"), HasSubstr("last heard of")));
  EXPECT_EQ(ranks[1].join(std::chrono::seconds(60)), 3) << ranks[1].output();
  EXPECT_THAT(ranks[1].output(), AllOf(HasSubstr("rank 0"), HasSubstr("the store")));
  EXPECT_LT(seconds_since(begin), 40);
}

}  // namespace
}  // namespace plumb::testing

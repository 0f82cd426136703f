// The core of the corpus with real processes over gloo: this program starts itself once per rank.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <iostream>

#include "scenarios/support/corpus.h"

namespace plumb::scenarios {
namespace {

constexpr const char* kScenario = "PLUMB_TEST_SCENARIO";
constexpr const char* kStrategy = "PLUMB_TEST_STRATEGY";

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool good = bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(fd);
  return good ? ntohs(address.sin_port) : 0;
}

// The part of one rank: plays the scenario, and compares with the reference.
int play_rank() {
  at::set_num_threads(1);
  const Scenario& scenario = scenario_called(std::getenv(kScenario));
  try {
    const World world = World::join({.timeout = std::chrono::seconds(30)});
    const Outcome found = play_on(world, scenario, std::getenv(kStrategy));
    const std::string wrong = difference(play_reference(scenario, world.size()), found, scenario.tolerance);
    if (wrong.empty()) return 0;
    std::cerr << "rank " << world.rank() << ": " << wrong << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}

void plays(const std::string& scenario, const std::string& strategy, int ranks) {
  const std::string port = std::to_string(free_port());
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::array<std::pair<const char*, std::string>, 7> environment = {{{"RANK", std::to_string(rank)},
                                                                             {"LOCAL_RANK", std::to_string(rank)},
                                                                             {"WORLD_SIZE", std::to_string(ranks)},
                                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                                             {"MASTER_PORT", port},
                                                                             {kScenario, scenario},
                                                                             {kStrategy, strategy}}};
    const pid_t child = fork();
    if (child == 0) {
      for (const auto& [name, value] : environment) setenv(name, value.c_str(), 1);
      execl("/proc/self/exe", "plumb_process_tests", nullptr);
      _exit(127);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << scenario << ", " << strategy << ", rank " << rank;
  }
}

class Processes : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Processes, EqualTheReference) { plays(std::get<0>(GetParam()), std::get<1>(GetParam()), 2); }

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) names.push_back(row.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(
    Gloo, Processes,
    testing::Combine(testing::Values("BackwardsEachReducedWithoutZeroGradBetween", "RebuildBeforeTheHeldBackwards",
                                     "ZeroGradToNoneAtAnyMoment", "TwoForwardsThenTwoBackwardsInReverse",
                                     "UnfreezesWhatWasFrozenWhenTheEngineWasBuilt",
                                     "TwoLossesOverOneRetainedForwardZeroingBetween",
                                     "ReentrantCheckpointsAndAWeightInSeveral", "ParametersUsedOnTheLastRankOnly",
                                     "ARankWithNothingToContributeCallsTheEnginesBackward",
                                     "AnExceptionInBackwardThenARetry", "SeveralDtypesInOneModule",
                                     "ClippingByGlobalNormThatBites"),
                     testing::ValuesIn(strategy_names())),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

TEST(Processes, FourOfThemEqualTheReferenceToo) { plays("EveryRankUsesAnotherPart", "ddp", 4); }

// Before GoogleTest's main: a rank never gets there.
[[maybe_unused]] const int rank_part = [] {
  if (std::getenv(kScenario) != nullptr) std::_Exit(play_rank());
  return 0;
}();

}  // namespace
}  // namespace plumb::scenarios

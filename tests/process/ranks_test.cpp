// The core of the corpus with real processes: this program starts itself once per rank. They talk over shared memory, over
// gloo with what a machine shares beside it, or over TCP alone, as ranks on machines of their own do.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <iostream>

#include "scenarios/support/corpus.h"
#include "slowness.h"
#include "world/support/port.h"

namespace plumb::scenarios {
namespace {

constexpr const char* kScenario = "PLUMB_TEST_SCENARIO";
constexpr const char* kStrategy = "PLUMB_TEST_STRATEGY";
constexpr const char* kBackend = "PLUMB_TEST_BACKEND";
constexpr const char* kAsks = "PLUMB_TEST_ASKS";

// The part of one rank: plays the scenario, and compares with the reference.
int play_rank() {
  at::set_num_threads(1);
  Scenario scenario = scenario_called(std::getenv(kScenario));
  scenario.options.ask_before_gathers = std::getenv(kAsks) != nullptr;
  try {
    const std::string carrier = std::getenv(kBackend);
    if (carrier == "tcp") setenv("PLUMB_SHM", "0", 1);
    const World world = World::join({.backend = carrier, .timeout = std::chrono::seconds(30 * patience)});
    const Outcome found = play_on(world, scenario, std::getenv(kStrategy));
    const std::string wrong = difference(play_reference(scenario, world.size()), found, scenario.tolerance);
    if (wrong.empty()) return 0;
    std::cerr << "rank " << world.rank() << ": " << wrong << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}

enum class Gathers { unasked, asked };

void plays(const std::string& scenario, const std::string& strategy, const std::string& backend, int ranks,
           Gathers how = Gathers::unasked) {
  const plumb::testing::Port port;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::array<std::pair<const char*, std::string>, 8> environment = {{{"RANK", std::to_string(rank)},
                                                                             {"LOCAL_RANK", std::to_string(rank)},
                                                                             {"WORLD_SIZE", std::to_string(ranks)},
                                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                                             {"MASTER_PORT", port.number()},
                                                                             {kScenario, scenario},
                                                                             {kStrategy, strategy},
                                                                             {kBackend, backend}}};
    const pid_t child = fork();
    if (child == 0) {
      for (const auto& [name, value] : environment) setenv(name, value.c_str(), 1);
      if (how == Gathers::asked) setenv(kAsks, "1", 1);
      if (rank == 0) {
        setenv("PLUMB_STORE_FD", std::to_string(port.fd()).c_str(), 1);
        fcntl(port.fd(), F_SETFD, 0);
      }
      execl("/proc/self/exe", "plumb_process_tests", nullptr);
      _exit(127);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << scenario << ", " << strategy << ", " << backend << ", rank " << rank;
  }
}

class Processes : public ::testing::TestWithParam<std::tuple<std::string, std::string, std::string>> {};

TEST_P(Processes, EqualTheReference) {
  const auto& [scenario, strategy, backend] = GetParam();
  // A unit is gathered by all ranks there, and one of them does not use it, or not any more.
  const bool apart = scenario == "ParametersUsedOnTheLastRankOnly" ||
                     scenario == "AnExceptionInBackwardOnOneRankThenARetry" ||
                     scenario == "ARankWithNothingToContributeCallsTheEnginesBackward";
  const bool travels = backend == "tcp" && plumb::strategy(strategy).parameter == Placement::sharded;
  plays(scenario, strategy, backend, 2, apart && travels ? Gathers::asked : Gathers::unasked);
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) names.push_back(row.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(
    World, Processes,
    ::testing::Combine(::testing::Values("BackwardsEachReducedWithoutZeroGradBetween", "RebuildBeforeTheHeldBackwards",
                                         "ZeroGradToNoneAtAnyMoment", "TwoForwardsThenTwoBackwardsInReverse",
                                         "UnfreezesWhatWasFrozenWhenTheEngineWasBuilt",
                                         "TwoLossesOverOneRetainedForwardZeroingBetween",
                                         "ReentrantCheckpointsAndAWeightInSeveral", "ParametersUsedOnTheLastRankOnly",
                                         "ARankWithNothingToContributeCallsTheEnginesBackward",
                                         "AnExceptionInBackwardThenARetry", "AnExceptionInBackwardOnOneRankThenARetry",
                                         "SeveralDtypesInOneModule", "ClippingByGlobalNormThatBites"),
                       ::testing::ValuesIn(strategy_names()), ::testing::Values("tcp", "gloo", "shm")),
    [](const auto& info) {
      return std::get<0>(info.param) + "_" + std::get<1>(info.param) + "_" + std::get<2>(info.param);
    });

TEST(Processes, FourOfThemEqualTheReferenceToo) {
  for (const char* backend : {"tcp", "gloo", "shm"}) plays("EveryRankUsesAnotherPart", "ddp", backend, 4);
  for (const char* backend : {"gloo", "shm"}) {
    plays("ALateGradientOfTheSecondOfTwoReductionsOnTheWay", "hsdp", backend, 4);
    plays("ALateGradientOfTheLastReductionBeforeTheEndOfTheBackward", "hsdp", backend, 4);
  }
  for (const char* strategy : {"zero3", "hsdp"}) {
    plays("EveryRankUsesAnotherPart", strategy, "tcp", 4, Gathers::asked);
    plays("AnExceptionInBackwardOnOneRankThenARetry", strategy, "tcp", 4, Gathers::asked);
  }
}

// Before GoogleTest's main: a rank never gets there.
[[maybe_unused]] const int rank_part = [] {
  if (std::getenv(kScenario) != nullptr) std::_Exit(play_rank());
  return 0;
}();

}  // namespace
}  // namespace plumb::scenarios

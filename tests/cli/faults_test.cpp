// A rank that is killed, stopped or throws, at every point of the road (world/road.h): the others end in time, one message
// names it and says where everybody was, nothing is left behind, and a restart ends with the bits of the undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "cli/support/program.h"
#include "plumb/error.h"
#include "slowness.h"
#include "watch/road.h"
#include "watch/strike.h"

namespace plumb::test {

namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A rank that is stopped is missed after this long; one that starts on a busy machine must not be.
const std::string kTimeout = std::to_string(12 * patience);

struct Fault {
  int rank;
  std::string point;  // "hook:30"
  std::string kind;
  std::string text() const { return "rank=" + std::to_string(rank) + ",point=" + point + ",kind=" + kind; }
};

Words saving(const Words& more) {
  Words words = tiny({"--json", "--deterministic", "--virtual-ranks", "4", "--steps", "24", "--questions", "8",
                      "--save-every", "3", "--eval-every", "20", "--timeout", kTimeout});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

const std::string& undisturbed() {
  static const std::string digest = [] {
    const Scratch scratch;
    const Result result = run(saving({"--ranks", "1", "--checkpoint", scratch.path("saved")}));
    EXPECT_EQ(result.code, 0) << result.err;
    return result.last()["model_digest"].get<std::string>();
  }();
  return digest;
}

std::set<std::string> shared_memory() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    if (entry.path().filename().string().find("plumb") != std::string::npos) names.insert(entry.path().string());
  }
  return names;
}

// Names that were not there before, and stay: those of other programs come and go.
std::set<std::string> left_in_shared_memory(const std::set<std::string>& before) {
  const auto since = [&] {
    std::set<std::string> names;
    for (const std::string& name : shared_memory()) {
      if (!before.contains(name)) names.insert(name);
    }
    return names;
  };
  std::set<std::string> left = since();
  for (int looks = 0; !left.empty() && looks < 100; ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::set<std::string> still;
    for (const std::string& name : since()) {
      if (left.contains(name)) still.insert(name);
    }
    left = still;
  }
  return left;
}

// The lines of stderr, life by life.
std::vector<std::vector<std::string>> lives_of(const std::string& text) {
  std::vector<std::vector<std::string>> lives(1);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("plumb: restart ")) {
      lives.emplace_back();
    } else if (!line.empty()) {
      lives.back().push_back(line);
    }
  }
  return lives;
}

// The one message of a life in which `fault` struck.
void check_message(const std::vector<std::string>& lines, const Fault& fault, int ranks) {
  const std::string who = "rank " + std::to_string(fault.rank);
  ASSERT_EQ(lines.size(), 2u) << ::testing::PrintToString(lines);
  EXPECT_EQ(lines[0], "plumb: PLUMB_FAULT strikes " + who + " at " + fault.point + ": " + fault.kind);
  if (fault.kind == "throw") {
    EXPECT_THAT(lines[1], HasSubstr(who));
    EXPECT_THAT(lines[1], HasSubstr("PLUMB_FAULT asked for an error at " + fault.point));
    return;
  }
  EXPECT_THAT(lines[1],
              HasSubstr(who + (fault.kind == "kill" ? " was ended by signal 9" : " was stopped by signal 19")));
  // Where it was, and where each of the others was.
  Passed there;
  for (int i = 1; i < kPoints; ++i) {
    if (fault.point.starts_with(std::string(name_of(static_cast<Point>(i))) + ":")) there.point = static_cast<Point>(i);
  }
  const std::string doing = describe(there);
  EXPECT_THAT(lines[1], HasSubstr(", " + doing.substr(0, doing.find(','))));
  if (fault.point.starts_with("join:")) return;  // the others may not have begun
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == fault.rank) continue;
    EXPECT_THAT(lines[1], HasSubstr("; rank " + std::to_string(rank) + " was "));
  }
}

// One run that goes through all of them, a life each, and then ends well. A checkpoint is there for sure once the next one
// begins: before a fault in loading, one strikes after step 6.
void survives(const std::string& strategy, const std::vector<Fault>& faults, int ranks = 2,
              Environment environment = {}) {
  const Scratch scratch;
  const auto before = shared_memory();
  std::string plan;
  for (const Fault& fault : faults) plan += (plan.empty() ? "" : ";") + fault.text();
  SCOPED_TRACE(strategy + ": " + plan);
  environment["PLUMB_FAULT"] = plan;
  Program program(saving({"--ranks", std::to_string(ranks), "--strategy", strategy, "--checkpoint",
                          scratch.path("saved"), "--restarts", std::to_string(faults.size())}),
                  environment);
  const Result result = program.wait();
  EXPECT_FALSE(program.alive());
  EXPECT_THAT(left_in_shared_memory(before), IsEmpty());
  const auto lives = lives_of(result.err);
  ASSERT_EQ(lives.size(), faults.size() + 1) << result.err;
  for (size_t i = 0; i < faults.size(); ++i) check_message(lives[i], faults[i], ranks);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last()["model_digest"].get<std::string>(), undisturbed());
  if (environment.contains("PLUMB_MACHINES")) {
    EXPECT_THAT(result.last()["backend"].get<std::string>(), HasSubstr("tcp"));
  }
}

TEST(Faults, KilledAndThrowingUnderDdp) {
  survives("ddp", {{1, "join:1", "kill"},
                   {0, "setup:1", "throw"},
                   {1, "hook:260", "kill"},
                   {0, "agree:6", "throw"},
                   {0, "load:1", "kill"},
                   {1, "exit:1", "kill"}});
}

TEST(Faults, KilledAndThrowingUnderZero1) {
  survives("zero1", {{0, "setup:2", "kill"},
                     {1, "join:2", "throw"},
                     {1, "update:8", "kill"},
                     {1, "read:1", "throw"},
                     {0, "publish:5", "throw"},
                     {1, "evaluate:1", "kill"}});
}

TEST(Faults, KilledAndThrowingUnderZero2) {
  survives("zero2", {{1, "step:8", "kill"},
                     {1, "fill:1", "kill"},
                     {0, "save:1", "kill"},
                     {1, "reduce:9", "throw"},
                     {0, "update:2", "throw"}});
}

TEST(Faults, KilledAndThrowingUnderZero3) {
  survives("zero3", {{1, "gather:60", "kill"},
                     {0, "gather:40", "throw"},
                     {1, "snapshot:1", "kill"},
                     {0, "write:1", "kill"},
                     {0, "commit:1", "kill"},
                     {0, "hook:30", "throw"}});
}

// As if on two machines, with TCP between them.
TEST(Faults, KilledAndThrowingBetweenMachines) {
  survives("zero2", {{1, "reduce:9", "kill"}, {0, "update:5", "throw"}}, 2, {{"PLUMB_MACHINES", "2"}});
  survives("zero3", {{3, "gather:60", "kill"}, {0, "hook:30", "throw"}}, 4, {{"PLUMB_MACHINES", "2"}});
}

// The state of each socket of this machine, by its number in the system.
std::map<std::string, std::string> sockets() {
  std::map<std::string, std::string> states;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      const std::vector<std::string> fields(std::istream_iterator<std::string>(words), {});
      if (fields.size() > 9) states[fields[9]] = fields[3];
    }
  }
  return states;
}

// Those that these processes listen at.
std::set<std::string> ports_of(const std::vector<pid_t>& processes) {
  const auto states = sockets();
  std::set<std::string> ports;
  std::error_code ignored;
  for (const pid_t pid : processes) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ignored)) {
      const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
      if (!target.starts_with("socket:[")) continue;
      const auto found = states.find(target.substr(8, target.size() - 9));
      if (found != states.end() && found->second == "0A") ports.insert(found->first);
    }
  }
  return ports;
}

TEST(Faults, NoPortIsBoundAfterARun) {
  for (const std::string ending : {"kill", "itself"}) {
    const Scratch scratch;
    Program program(saving({"--ranks", "2", "--checkpoint", scratch.path("saved")}), {{"PLUMB_MACHINES", "2"}});
    program.wait_for_lines(3);
    std::vector<pid_t> ranks = program.children();
    ASSERT_EQ(ranks.size(), 2u);
    std::vector<pid_t> all = ranks;
    all.push_back(program.pid());
    const auto ports = ports_of(all);
    EXPECT_THAT(ports, ::testing::Not(IsEmpty())) << "where the ranks met";
    if (ending == "kill") kill(ranks[1], SIGKILL);
    EXPECT_EQ(program.wait().code, ending == "kill" ? 1 : 0);
    const auto left = sockets();
    for (const std::string& port : ports) EXPECT_FALSE(left.contains(port)) << ending;
  }
}

TEST(Faults, TheOrderOfTheBuckets) {
  const Scratch scratch;
  const Result result = run(tiny({"--json", "--ranks", "2", "--steps", "6", "--questions", "8", "--checkpoint",
                                  scratch.path("saved"), "--restarts", "1", "--timeout", kTimeout}),
                            {{"PLUMB_FAULT", "rank=1,point=rebuild:1,kind=kill"}});
  EXPECT_EQ(result.code, 0) << result.err;
  const auto lives = lives_of(result.err);
  ASSERT_EQ(lives.size(), 2u) << result.err;
  check_message(lives[0], {1, "rebuild:1", "kill"}, 2);
}

// A save that fails is no reason to end.
TEST(Faults, ASaveThatThrowsIsGoneOnWithout) {
  const Scratch scratch;
  int folder = 0;
  for (const std::string point : {"snapshot:1", "commit:1"}) {
    const Result result =
        run(saving({"--ranks", "2", "--strategy", "zero3", "--checkpoint", scratch.path(std::to_string(++folder))}),
            {{"PLUMB_FAULT", "rank=0,point=" + point + ",kind=throw"}});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("failed on rank 0: rank 0: PLUMB_FAULT asked for an error at " + point));
    EXPECT_THAT(result.err, HasSubstr("training goes on"));
    EXPECT_EQ(result.last()["model_digest"].get<std::string>(), undisturbed());
  }
}

TEST(Faults, NonsenseIsRefused) {
  for (const auto& [text, why] : std::vector<std::pair<std::string, std::string>>{
           {"rank=1", "rank, point and kind are needed"},
           {"rank=1,point=nowhere:1,kind=kill", "there is no point 'nowhere', but join, setup, "},
           {"rank=1,point=hook:0,kind=kill", "'0' is no number from 1 on"},
           {"rank=1,point=hook:1,kind=maim", "'kind=maim' says nothing"},
           {"rank=1,point=load:1,kind=flip", "a bit can be flipped at hook and publish"}}) {
    try {
      read_strikes(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  }
  const auto lives = read_strikes("rank=0,point=hook:7,kind=stop;;rank=3,point=exit,kind=throw");
  ASSERT_EQ(lives.size(), 3u);
  EXPECT_EQ(lives[0].number, 7);
  EXPECT_EQ(lives[1].kind, Strike::Kind::none);
  EXPECT_EQ(lives[2].rank, 3);
  // A program that was asked nonsense says so and does nothing.
  const Result result = run(tiny({"--steps", "1"}), {{"PLUMB_FAULT", "rank=1"}});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("rank, point and kind are needed"));
}

// Every point × kind × strategy, on 2 and on 4 ranks, each in a run of its own, where PLUMB_FAULTS=all asks for it
// (scripts/faults, which runs them in pieces); a few otherwise.
struct Trial {
  int ranks;
  std::string strategy, point, kind;
  friend std::ostream& operator<<(std::ostream& out, const Trial& trial) {
    return out << trial.ranks << " " << trial.strategy << " " << trial.point << " " << trial.kind;
  }
};

std::vector<Trial> trials() {
  const char* asked = std::getenv("PLUMB_FAULTS");
  if (asked == nullptr || std::string(asked) != "all")
    return {{2, "zero3", "snapshot:1", "stop"}, {4, "hsdp", "hook:60", "kill"}};
  std::vector<Trial> all;
  for (const auto& [ranks, strategy] : std::vector<std::pair<int, std::string>>{{2, "ddp"},
                                                                                {2, "zero1"},
                                                                                {2, "zero2"},
                                                                                {2, "zero3"},
                                                                                {4, "hsdp"},
                                                                                {4, "ddp"},
                                                                                {4, "zero1"},
                                                                                {4, "zero2"},
                                                                                {4, "zero3"}}) {
    const bool sharded = strategy == "zero3" || strategy == "hsdp";
    for (const std::string point :
         {"join:1",   "join:2", "setup:1",  "setup:2",   "gather:50",  "hook:60", "reduce:9",
          "agree:9",  "step:8", "update:8", "publish:8", "save:1",     "write:1", "snapshot:1",
          "commit:1", "load:1", "read:1",   "fill:1",    "evaluate:1", "exit:1"}) {
      if (point.starts_with("gather") && !sharded) continue;
      const bool saves = point == "save:1" || point == "snapshot:1" || point == "write:1" || point == "commit:1";
      for (const std::string kind : {"kill", "throw", "stop"}) {
        // A save that fails is no end (see above).
        if (kind != "throw" || !saves) all.push_back({ranks, strategy, point, kind});
      }
    }
  }
  return all;
}

class FaultTrials : public ::testing::TestWithParam<Trial> {};

TEST_P(FaultTrials, AreSurvived) {
  const Trial& trial = GetParam();
  const int ranks = trial.ranks;
  std::vector<Fault> faults;
  const bool loads = trial.point == "load:1" || trial.point == "read:1" || trial.point == "fill:1";
  if (loads) faults.push_back({1, "update:8", "kill"});
  faults.push_back({static_cast<int>(trial.point.size() + trial.kind.size()) % ranks, trial.point, trial.kind});
  survives(trial.strategy, faults, ranks);
}

INSTANTIATE_TEST_SUITE_P(All, FaultTrials, ::testing::ValuesIn(trials()), [](const auto& info) {
  const Trial& trial = info.param;
  std::string name = std::to_string(trial.ranks) + "_" + trial.strategy + "_" + trial.point + "_" + trial.kind;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

}  // namespace

}  // namespace plumb::test

// The rendezvous of real processes: what is said, to whom and when, if they cannot be one world.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

#include "world/support/processes.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

// One process: its rank, the size it was told, and what else it finds in its environment.
struct Told {
  int rank;
  int size;
  Variables more{};
};

std::vector<Process> start(const std::string& role, const std::vector<Told>& all, const Variables& common) {
  const std::string port = std::to_string(free_port());  // any of them may be rank 0
  std::vector<Process> processes;
  for (const Told& one : all) {
    Variables variables{{"RANK", std::to_string(one.rank)},
                        {"WORLD_SIZE", std::to_string(one.size)},
                        {"LOCAL_RANK", std::to_string(one.rank)},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", port}};
    for (const auto& from : {common, one.more}) {
      for (const auto& [name, value] : from) variables[name] = value;
    }
    processes.emplace_back(role, variables);
  }
  return processes;
}

// How processes may be connected: where they share memory, and where each might have a machine of its own.
const Variables shm{{"PLUMB_TEST_BACKEND", "shm"}};
const Variables gloo{{"PLUMB_TEST_BACKEND", "gloo"}};
const Variables tcp{{"PLUMB_TEST_BACKEND", "tcp"}, {"PLUMB_SHM", "0"}};
const Variables any{};

// Every process ends with an error that holds all of `words`, within the time-out.
void expect_all_told(std::vector<Process>& processes, const std::vector<std::string>& words, int timeout = 60) {
  const auto begin = Clock::now();
  for (auto& process : processes) {
    ASSERT_EQ(process.join(std::chrono::seconds(timeout)), 3) << process.output();
    for (const std::string& word : words) ASSERT_THAT(process.output(), HasSubstr(word));
  }
  EXPECT_LT(seconds_since(begin), timeout);
}

// With a time-out in seconds.
Variables within(int seconds, Variables variables) {
  variables["PLUMB_TEST_TIMEOUT_MS"] = std::to_string(1000 * seconds);
  return variables;
}

std::string named(const std::string& what, const Process& process) {
  return what + " (process " + std::to_string(process.pid()) + " on ";
}

TEST(Rendezvous, RanksThatWereToldDifferentSizesAllHearOfBoth) {
  struct Row {
    const Variables& carrier;
    int first, second;
  };
  for (const Row& row :
       {Row{shm, 2, 3}, Row{shm, 3, 2}, Row{tcp, 2, 3}, Row{tcp, 3, 2}, Row{gloo, 3, 2}, Row{any, 2, 4}}) {
    auto two = start("reduce for ever", {{0, row.first}, {1, row.second}}, within(20, row.carrier));
    expect_all_told(two,
                    {"WORLD_SIZE=" + std::to_string(row.first) + " on " + named("rank 0", two[0]),
                     "WORLD_SIZE=" + std::to_string(row.second) + " on " + named("rank 1", two[1]),
                     "start every rank with the same size"},
                    20);
    if (HasFatalFailure()) return;
  }
}

TEST(Rendezvous, ARankThatWasToldMoreThanTheOthersTellsThemThoughTheyRunAlready) {
  for (const Variables& carrier : {shm, tcp}) {
    auto ranks = start("reduce for ever", {{0, 2}, {1, 2}}, carrier);
    const std::string port = ranks[0].variable("MASTER_PORT");
    for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
    Variables variables{{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
    variables.insert(carrier.begin(), carrier.end());
    ranks.emplace_back("reduce for ever", variables);
    expect_all_told(ranks,
                    {"WORLD_SIZE=2 on " + named("rank 0", ranks[0]), "WORLD_SIZE=3 on " + named("rank 2", ranks[2])});
    if (HasFatalFailure()) return;
  }
}

TEST(Rendezvous, ANumberThatIsClaimedTwiceEndsEveryRank) {
  struct Row {
    const Variables& carrier;
    int twice, size;  // three processes: as many as there are ranks, or one more
  };
  for (const Row& row : {Row{shm, 0, 3}, Row{shm, 1, 2}, Row{tcp, 0, 2}, Row{tcp, 1, 3}}) {
    auto all = start("reduce for ever", {{0, row.size}, {1, row.size}, {row.twice, row.size}}, within(20, row.carrier));
    expect_all_told(all,
                    {"rank " + std::to_string(row.twice) + " was claimed twice: by process ",
                     "process " + std::to_string(all[row.twice].pid()) + " on ",
                     "process " + std::to_string(all[2].pid()) + " on ", "a rank of its own"},
                    20);
    if (HasFatalFailure()) return;
  }
}

TEST(Rendezvous, ANumberThatIsClaimedAgainEndsAWorldThatRunsAlready) {
  for (const int twice : {0, 1}) {
    auto ranks = start("reduce for ever", {{0, 2}, {1, 2}}, {});
    const std::string port = ranks[0].variable("MASTER_PORT");
    for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
    ranks.emplace_back(
        "join",
        Variables{
            {"RANK", std::to_string(twice)}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
    expect_all_told(ranks, {"rank " + std::to_string(twice) + " was claimed twice: by process " +
                                std::to_string(ranks[twice].pid()),
                            "and by process " + std::to_string(ranks[2].pid())});
    if (HasFatalFailure()) return;
  }
}

TEST(Rendezvous, WhoeverComesWhenAllMustHaveComeIsRefusedAlone) {
  // All ranks of a world come within its time-out: later, a second one of a number is a stranger for certain.
  auto ranks = start("reduce for ever", {{0, 2}, {1, 2}}, {{"PLUMB_TEST_TIMEOUT_MS", "3000"}});
  const auto begin = Clock::now();
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for("READY")) << rank.output();
  while (seconds_since(begin) < 4.5) usleep(50'000);
  for (const char* number : {"0", "1"}) {
    Process again("join", {{"RANK", number},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", ranks[0].variable("MASTER_PORT")}});
    EXPECT_EQ(again.join(), 3) << again.output();
    EXPECT_THAT(again.output(), HasSubstr(std::string("rank ") + number + " was claimed twice"));
  }
  EXPECT_FALSE(ranks[0].wait_for("ERROR", std::chrono::seconds(2)));
  EXPECT_FALSE(ranks[1].wait_for("ERROR", std::chrono::seconds(1)));
}

TEST(Rendezvous, ARankOfAnotherJobIsRefusedAndTheWorldItReachedGoesOn) {
  struct Row {
    Variables ours, theirs;
    std::string our_name, their_name;
  };
  const std::vector<Row> rows{
      {{{"PLUMB_JOB", "red"}}, {{"PLUMB_JOB", "blue"}}, "job red", "job blue"},
      {{{"TORCHELASTIC_RUN_ID", "a"}}, {{"TORCHELASTIC_RUN_ID", "b"}}, "torchrun's run a", "torchrun's run b"},
  };
  for (const Row& row : rows) {
    // The stranger is there first: its number must stay free for the rank that it belongs to.
    std::vector<Told> all{{0, 2, row.ours}};
    auto ours = start("verbs", all, {});
    const std::string port = ours[0].variable("MASTER_PORT");
    const auto more = [&](int rank, int size, Variables variables) {
      variables.insert({{"RANK", std::to_string(rank)},
                        {"WORLD_SIZE", std::to_string(size)},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", port}});
      return Process("verbs", variables);
    };
    for (const auto& [rank, size] : {std::pair{1, 2}, std::pair{2, 3}}) {
      Process stranger = more(rank, size, row.theirs);
      EXPECT_EQ(stranger.join(), 3) << stranger.output();
      EXPECT_THAT(stranger.output(), AllOf(HasSubstr("127.0.0.1:" + port + " is where another job meets"),
                                           HasSubstr(row.our_name), HasSubstr(row.their_name),
                                           HasSubstr("MASTER_PORT of its own"), HasSubstr(named("rank 0", ours[0]))));
    }
    Process zero = more(0, 2, row.theirs);
    EXPECT_EQ(zero.join(), 3) << zero.output();
    EXPECT_THAT(zero.output(), AllOf(HasSubstr("another job"), HasSubstr(row.our_name)));
    ours.push_back(more(1, 2, row.ours));
    for (auto& rank : ours) EXPECT_EQ(rank.join(), 0) << rank.output();
  }
}

TEST(Rendezvous, AWorldWhoseRankWentToAnotherJobNamesTheOneThatCameInstead) {
  auto both = start("join", {{0, 2, {{"PLUMB_JOB", "red"}}}, {1, 2, {{"PLUMB_JOB", "blue"}}}},
                    {{"PLUMB_TEST_TIMEOUT_MS", "3000"}});
  EXPECT_EQ(both[1].join(), 3) << both[1].output();
  EXPECT_EQ(both[0].join(), 3) << both[0].output();
  EXPECT_THAT(both[0].output(), AllOf(HasSubstr("did not hear of rank 1"), HasSubstr(named("rank 1", both[1])),
                                      HasSubstr("of job blue")));
}

TEST(Rendezvous, AJobWithoutANameIsNobodysStranger) {
  auto ranks = start("verbs", {{0, 2, {{"PLUMB_JOB", "red"}}}, {1, 2}}, {});
  for (auto& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
}

TEST(Rendezvous, AnUnreachableMasterIsNamedWithinTheTimeOut) {
  const int port = free_port();
  Process rank("join", {{"RANK", "1"},
                        {"WORLD_SIZE", "2"},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", std::to_string(port)},
                        {"PLUMB_TEST_TIMEOUT_MS", "2000"}});
  EXPECT_EQ(rank.join(), 3) << rank.output();
  EXPECT_THAT(rank.output(), AllOf(HasSubstr("rank 1: cannot reach rank 0 at 127.0.0.1:" + std::to_string(port)),
                                   HasSubstr("MASTER_ADDR")));
}

TEST(Rendezvous, RanksThatDoNotComeAreNamed) {
  Process rank("join", {{"RANK", "0"},
                        {"WORLD_SIZE", "3"},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", std::to_string(free_port())},
                        {"PLUMB_TEST_TIMEOUT_MS", "1500"}});
  EXPECT_EQ(rank.join(), 3) << rank.output();
  EXPECT_THAT(rank.output(), HasSubstr("did not hear of rank 1, rank 2"));
}

// It stays open here meanwhile, so that no other way of serving the port would work.
TEST(Rendezvous, RankZeroServesThePortThatItsLauncherHasBound) {
  const Port port;
  std::vector<Process> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.emplace_back("join", at_port(port, rank, 2));
  for (Process& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
}

// What a rank starts may outlive it, and would hold the port that the next run wants.
TEST(Rendezvous, NoProgramThatARankStartsHasThePort) {
  const Port port;
  std::vector<Process> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.emplace_back("start a program", at_port(port, rank, 2));
  for (Process& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
}

// Left over from another launcher's rank: closed, of another port, or no socket at all.
TEST(Rendezvous, ADescriptorThatIsNotBoundToThePortIsLeftAlone) {
  const Port other;
  for (const int fd : {other.fd(), 1, 777}) {
    auto ranks = start_ranks("join", 2, {{"PLUMB_STORE_FD", std::to_string(fd)}});
    for (Process& rank : ranks) EXPECT_EQ(rank.join(), 0) << rank.output();
  }
}

TEST(Rendezvous, APortInUseIsSaidOnEveryRank) {
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(fd, 8), 0);
  socklen_t length = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  const std::string port = std::to_string(ntohs(address.sin6_port));
  auto ranks = start_ranks("join", 2, {{"MASTER_PORT", port}, {"PLUMB_TEST_TIMEOUT_MS", "2000"}});
  EXPECT_EQ(ranks[0].join(), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(), AllOf(HasSubstr("127.0.0.1:" + port), HasSubstr("in use"), HasSubstr("MASTER_PORT")));
  EXPECT_EQ(ranks[1].join(), 3) << ranks[1].output();
  EXPECT_THAT(ranks[1].output(), AllOf(HasSubstr("127.0.0.1:" + port), HasSubstr("MASTER_PORT")));
  close(fd);
}

}  // namespace
}  // namespace plumb::testing

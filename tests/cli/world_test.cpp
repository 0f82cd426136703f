// How the program starts, stops and fails as a world of several processes.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "cli/support/program.h"
#include "slowness.h"

namespace plumb::test {

namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Environment place(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", std::to_string(port)}};
}

Words endless(const Words& more) {
  Words words = tiny({"--json", "--steps", "1000000", "--eval-every", "0"});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void expect_one_error_line(const Result& result, int code) {
  EXPECT_EQ(result.code, code) << result.err;
  EXPECT_THAT(result.err, StartsWith("plumb: "));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

TEST(World, TakesPartInALaunchersWorld) {
  const int port = free_port();
  Program zero(tiny({"--json"}), place(0, 2, port));
  Program one(tiny({"--json"}), place(1, 2, port));
  const Result talker = zero.wait(), listener = one.wait();
  ASSERT_EQ(talker.code, 0) << talker.err;
  ASSERT_EQ(listener.code, 0) << listener.err;
  EXPECT_EQ(talker.last()["ranks"], 2);
  EXPECT_EQ(listener.out, "");
}

TEST(World, StartsItsOwnWhenRanksAreGivenInsideALaunchersWorld) {
  const Result result = run(tiny({"--json", "--ranks", "1"}), place(1, 2, free_port()));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last()["ranks"], 1);
  // Also where that launcher serves a store, to its own ranks.
  Environment elastic = place(1, 4, free_port());
  elastic["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  elastic["TORCHELASTIC_RESTART_COUNT"] = "1";
  const Result two = run(tiny({"--json", "--ranks", "2", "--timeout", "5", "--steps", "2"}), elastic);
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(two.last()["ranks"], 2);
}

TEST(World, IsNotHalfDescribed) {
  for (const auto& [set, unset] : {std::pair{"RANK", "WORLD_SIZE"},
                                   {"WORLD_SIZE", "RANK"},
                                   {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                   {"PMI_SIZE", "PMI_RANK"}}) {
    const Result result = run(tiny({}), {{set, "1"}});
    expect_one_error_line(result, 1);
    EXPECT_THAT(result.err, HasSubstr(set + std::string("=1 is set, but ") + unset + " is not"));
    EXPECT_EQ(result.out, "");
  }
}

TEST(World, OfOneNeedsNoLauncherWhoeverLeftAVariable) {
  EXPECT_EQ(run(tiny({"--ranks", "1"}), {{"WORLD_SIZE", "2"}}).code, 0);
  EXPECT_EQ(run(tiny({}), {{"SLURM_PROCID", "1"}}).code, 0);
  // A batch script is no task of srun.
  EXPECT_EQ(run(tiny({}), {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"ENVIRONMENT", "BATCH"}}).code, 0);
}

TEST(World, CannotBeJoinedByThreads) {
  expect_one_error_line(run(tiny({"--backend", "local"}), place(0, 2, free_port())), 2);
}

TEST(World, StopsAllRanksAfterTheSameStepOnCtrlC) {
  for (const Words& how : {Words{"--ranks", "2"}, Words{"--ranks", "2", "--backend", "local"}, Words{"--ranks", "1"}}) {
    const Scratch scratch;
    Words words = endless(how);
    words.insert(words.end(), {"--out", scratch.path("run")});
    Program program(words);
    program.wait_for_lines(3);
    program.signal(SIGINT);
    kill(-program.pid(), SIGINT);  // a terminal signals the whole group: still one wish
    const Result result = program.wait();
    EXPECT_EQ(result.code, 130) << result.err;
    EXPECT_EQ(result.err, "");
    EXPECT_EQ(result.last()["stopped"], true);
    EXPECT_EQ(result.last()["steps"], result.losses().size());
    EXPECT_TRUE(scratch.has("run/report.html"));
    EXPECT_FALSE(program.alive());
  }
}

TEST(World, StopsWhileItStartsEvenIfTheSignalWasIgnoredBefore) {
  Words words = {"-c", "trap '' INT; exec \"$PLUMB\" \"$@\"", "sh"};  // as a script's background job
  for (const std::string& word : endless({"--ranks", "2"})) words.push_back(word);
  Program starting(words, {{"PLUMB", program()}}, "/bin/sh");
  for (int i = 0; i < 60'000 && starting.children().size() < 2; ++i) usleep(1'000);
  ASSERT_EQ(starting.children().size(), 2u);
  starting.signal(SIGINT);
  const Result result = starting.wait();
  EXPECT_EQ(result.code, 130) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_FALSE(starting.alive());
}

// Asked to stop, a run stops: that a rank failed over it is told, and is no reason to begin again.
TEST(World, StopsThoughARankFailsWhenItIsAskedTo) {
  const Scratch scratch;
  Program program(endless({"--ranks", "2", "--checkpoint", scratch.path("saved"), "--restarts", "2"}),
                  {{"PLUMB_FAULT", "rank=1,point=save:1,kind=kill"}});
  program.wait_for_lines(1);
  program.signal(SIGTERM);
  const Result result = program.wait();
  EXPECT_EQ(result.code, 143) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank 1 was ended by signal 9"));
  EXPECT_THAT(result.err, Not(HasSubstr("restart 1")));
}

// Between two lives the launcher says why it begins again; here it cannot, since nobody reads what it says.
TEST(World, StopsBetweenTwoLives) {
  const Scratch scratch;
  const std::string errors = scratch.path("errors");
  ASSERT_EQ(mkfifo(errors.c_str(), 0600), 0);
  const int pipe = open(errors.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(pipe, 0);
  const std::string filling(512, '.');
  while (write(pipe, filling.data(), filling.size()) > 0) continue;
  Words words = {"-c", "exec \"$@\" 2>\"$ERRORS\"", "sh", program()};
  for (const std::string& word : endless({"--ranks", "2", "--restarts", "1", "--checkpoint", scratch.path("saved")}))
    words.push_back(word);
  Program program(words, {{"ERRORS", errors}}, "/bin/sh");
  program.wait_for_lines(1);
  const auto ranks = program.children();
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGKILL);
  while (!program.children().empty()) usleep(1'000);  // until it has looked after both
  program.signal(SIGTERM);
  std::string said(1 << 20, '\0');
  ASSERT_GT(read(pipe, said.data(), said.size()), 0);  // what it says now finds room
  EXPECT_EQ(program.wait().code, 143);
  const ssize_t length = read(pipe, said.data(), said.size());
  close(pipe);
  said.resize(static_cast<size_t>(std::max<ssize_t>(length, 0)));
  EXPECT_THAT(said, AllOf(HasSubstr("rank 1 was ended by signal 9"), Not(HasSubstr("restart 1"))));
}

TEST(World, StopsTheLastEvaluationOnCtrlC) {
  for (const Words& how : {Words{"--ranks", "2", "--strategy", "zero3"}, Words{"--ranks", "1"}}) {
    Words words = tiny({"--json", "--steps", "3", "--questions", "10000000"});
    words.insert(words.end(), how.begin(), how.end());
    Program program(words);
    program.wait_for_lines(3);
    program.signal(SIGINT);
    const Result result = program.wait();
    EXPECT_EQ(result.code, 130) << result.err;
    EXPECT_EQ(result.err, "");
    EXPECT_EQ(result.last()["stopped"], true);
    EXPECT_EQ(result.last()["steps"], 3);
    EXPECT_GT(result.last()["asked"], 0);
    EXPECT_LT(result.last()["asked"], 10000000);
  }
}

// Who waits for the others to come is ended by a signal at once.
TEST(World, StopsWhileItJoins) {
  Program alone(endless({"--timeout", "60"}), place(0, 2, free_port()));
  const std::string status = "/proc/" + std::to_string(alone.pid()) + "/task";
  // Its store is served by a thread: from then on it joins.
  while (alone.alive() && std::distance(std::filesystem::directory_iterator(status), {}) < 2) usleep(1'000);
  usleep(500'000);
  alone.signal(SIGTERM);
  EXPECT_EQ(alone.wait().code, 143);
}

// Where ranks meet at the store, a failure of one is the others' at once: the time-out here is a minute.
TEST(World, TellsOfAFailureWhileItJoins) {
  for (const auto& [name, value, said] :
       {std::tuple{"PLUMB_SHAPE", "nonsense", "the shape 'nonsense' of the link"},
        {"GLOO_SOCKET_IFNAME", "nowhere", "there is no usable interface 'nowhere'"}}) {
    const int port = free_port();
    Environment first = place(0, 2, port), second = place(1, 2, port);
    first["PLUMB_SHM"] = second["PLUMB_SHM"] = "0";
    second[name] = value;
    const Words words = tiny({"--timeout", "600"});
    Program zero(words, first), one(words, second);
    const Result other = one.wait(), result = zero.wait();
    EXPECT_EQ(other.code, 1);
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 failed"), HasSubstr(said)));
  }
}

TEST(World, StopsWhenOneRankAloneIsAskedTo) {
  Program program(endless({"--ranks", "2"}));
  program.wait_for_lines(3);
  kill(program.children().at(1), SIGINT);
  EXPECT_EQ(program.wait().code, 130);
  EXPECT_FALSE(program.alive());
}

TEST(World, NamesTheRankThatWasKilled) {
  Program program(endless({"--ranks", "3", "--batch", "9"}));
  program.wait_for_lines(3);
  kill(program.children().at(1), SIGKILL);
  const Result result = program.wait();
  expect_one_error_line(result, 1);
  EXPECT_THAT(result.err, HasSubstr("rank 1"));
  EXPECT_THAT(result.err, HasSubstr("signal 9"));
  EXPECT_FALSE(program.alive());
}

TEST(World, LeavesNoRankBehindWhenItIsKilledItself) {
  Program program(endless({"--ranks", "2"}));
  program.wait_for_lines(3);
  const auto ranks = program.children();
  EXPECT_EQ(ranks.size(), 2u);
  program.signal(SIGKILL);
  EXPECT_EQ(program.wait().code, 128 + SIGKILL);  // returns once every rank has closed its pipes
}

std::string file_of(pid_t process, const std::string& name) {
  std::ifstream in("/proc/" + std::to_string(process) + "/" + name);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A restart among other programs must not fail because one of them was given the port a moment before.
TEST(World, HoldsThePortOfItsRanksUntilTheyMeetThere) {
  Program program(tiny({"--json", "--ranks", "2"}), {{"PLUMB_FAULT", "rank=0,point=join:1,kind=stop"}});
  const auto stopped = [&] {
    const auto ranks = program.children();
    return ranks.size() == 2 && file_of(ranks[0], "stat").find(") T ") != std::string::npos;
  };
  for (int i = 0; i < 60'000 && !stopped(); ++i) usleep(1'000);
  ASSERT_TRUE(stopped());
  const std::string environment = file_of(program.children()[0], "environ");
  const size_t at = environment.find("MASTER_PORT=");
  ASSERT_NE(at, std::string::npos);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(environment.substr(at + std::strlen("MASTER_PORT=")))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_NE(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
  kill(program.children()[0], SIGCONT);
  const Result result = program.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last()["ranks"], 2);
}

TEST(World, SaysWhenNobodyAnswersAtTheMastersAddress) {
  const Scratch scratch;
  const Result result = run(tiny({"--timeout", "2", "--out", scratch.path("run")}), place(1, 2, free_port()));
  expect_one_error_line(result, 1);
  EXPECT_THAT(result.err, HasSubstr("127.0.0.1"));
  EXPECT_FALSE(scratch.has("run"));
}

TEST(World, SaysWhenTheMastersPortIsInUse) {
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  socklen_t length = sizeof(address);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, 8) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    if (fd >= 0) close(fd);
    GTEST_SKIP() << "no socket on all addresses of this machine";
  }
  const int port = ntohs(address.sin6_port);
  const Result result = run(tiny({"--timeout", "3"}), place(0, 2, port));
  close(fd);
  expect_one_error_line(result, 1);
  EXPECT_THAT(result.err, HasSubstr(std::to_string(port)));
}

TEST(World, NamesTheRankThatDidNotJoinAndNoOther) {
  const int port = free_port();
  const Words words =
      tiny({"--timeout", std::to_string(6 * patience), "--backend", "gloo"});  // all three start well within
  Program two(words, place(2, 4, port)), three(words, place(3, 4, port)), zero(words, place(0, 4, port));
  const Result first = zero.wait();
  expect_one_error_line(first, 1);
  EXPECT_THAT(first.err, AllOf(HasSubstr("did not hear of rank 1"), Not(HasSubstr("rank 2"))));
  for (Program* other : {&two, &three}) {
    const Result result = other->wait();
    expect_one_error_line(result, 1);
    // Who is first to lose patience knows of rank 1; the store ends with rank 0.
    EXPECT_THAT(result.err, AnyOf(HasSubstr("did not hear of rank 1;"), HasSubstr("rank 0 (or the launcher")));
  }
}

TEST(World, ReportsAFailureOfARankOnceWithItsRank) {
  const Scratch scratch;
  // The run folder's parent is a file: only rank 0 finds out, after the first step.
  const std::string file = scratch.write("file", "x");
  const Result result = run(tiny({"--ranks", "2", "--timeout", "5", "--out", file + "/run"}));
  expect_one_error_line(result, 1);
  EXPECT_THAT(result.err, HasSubstr("rank 0"));
  EXPECT_THAT(result.err, HasSubstr("run folder"));
}

}  // namespace

}  // namespace plumb::test

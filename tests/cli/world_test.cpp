// How the program starts, stops and fails as a world of several processes.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
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

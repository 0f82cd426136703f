// Starts, watches and ends the processes of a test.
#include "world/support/processes.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

extern char** environ;

namespace plumb::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (auto& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

// The role is played before GoogleTest's main, and instead of it.
[[maybe_unused]] const bool in_role = [] {
  if (const char* role = std::getenv("PLUMB_TEST_ROLE")) std::exit(play(role));
  return false;
}();

}  // namespace

Process::Process(const std::string& role, const Variables& variables, const std::vector<std::string>& prefix)
    : variables_(variables) {
  Variables all = variables;
  all["PLUMB_TEST_ROLE"] = role;
  all["OMP_NUM_THREADS"] = "1";
  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!all.count(text.substr(0, text.find('=')))) environment.push_back(text);
  }
  for (const auto& [name, value] : all) environment.push_back(name + "=" + value);
  char program[4096] = {};
  if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) std::abort();
  std::vector<std::string> words = prefix;
  words.push_back(program);
  auto argv = pointers(words);
  auto envp = pointers(environment);
  const auto inherited = variables.find("PLUMB_STORE_FD");
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
  pid_ = fork();
  if (pid_ == 0) {
    if (inherited != variables.end()) fcntl(std::stoi(inherited->second), F_SETFD, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    environ = envp.data();
    execvp(argv[0], argv.data());
    _exit(127);
  }
  started_ = pid_;
  close(ends[1]);
  pipe_ = ends[0];
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), started_(other.started_), variables_(std::move(other.variables_)),
      pipe_(std::exchange(other.pipe_, -1)), output_(std::move(other.output_)) {}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (pipe_ >= 0) close(pipe_);
}

void Process::signal(int number) const { kill(pid_, number); }

bool Process::read_some(milliseconds limit) {
  pollfd entry{pipe_, POLLIN, 0};
  if (pipe_ < 0 || poll(&entry, 1, static_cast<int>(limit.count())) <= 0) return pipe_ >= 0;
  char buffer[4096];
  const ssize_t count = read(pipe_, buffer, sizeof buffer);
  if (count > 0) output_.append(buffer, count);
  return count > 0;
}

bool Process::wait_for(const std::string& text, std::chrono::seconds limit) {
  const auto end = Clock::now() + limit;
  while (output_.find(text) == std::string::npos) {
    if (Clock::now() > end || !read_some(milliseconds(50))) break;
  }
  return output_.find(text) != std::string::npos;
}

int Process::join(std::chrono::seconds limit) {
  const auto end = Clock::now() + limit;
  while (Clock::now() < end && read_some(milliseconds(50))) {
  }
  int status = 0;
  for (;;) {
    if (waitpid(pid_, &status, WNOHANG) == pid_) break;
    if (Clock::now() > end) return -1000;
    usleep(5000);
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

Variables at_port(const Port& port, int rank, int size) {
  Variables mine{{"RANK", std::to_string(rank)},
                 {"WORLD_SIZE", std::to_string(size)},
                 {"LOCAL_RANK", std::to_string(rank)},
                 {"MASTER_ADDR", "127.0.0.1"},
                 {"MASTER_PORT", port.number()}};
  if (rank == 0) mine["PLUMB_STORE_FD"] = std::to_string(port.fd());
  return mine;
}

std::vector<Process> start_ranks(const std::string& role, int size, const Variables& variables) {
  std::vector<Process> ranks;
  const Port port;
  for (int rank = 0; rank < size; ++rank) {
    Variables mine = at_port(port, rank, size);
    for (const auto& [name, value] : variables) mine[name] = value;
    ranks.emplace_back(role, mine);
  }
  return ranks;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void expect_named_when_killed(std::vector<Process>& ranks, int victim, double seconds, const std::string& words) {
  const auto begin = std::chrono::steady_clock::now();
  ranks[victim].signal(SIGKILL);
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    if (r == victim) continue;
    EXPECT_EQ(ranks[r].join(), 3) << ranks[r].output();
    EXPECT_THAT(ranks[r].output(), ::testing::HasSubstr(words));
  }
  EXPECT_LT(seconds_since(begin), seconds * patience);
  EXPECT_EQ(ranks[victim].join(), -SIGKILL);
}

}  // namespace plumb::testing

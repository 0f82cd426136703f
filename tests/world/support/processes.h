// Ranks as real processes: this test program again, in a role that the environment names.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "slowness.h"
#include "world/support/port.h"

namespace plumb::testing {

using Variables = std::map<std::string, std::string>;

// One process in a role. Killed, with certainty, when this ends.
class Process {
 public:
  // `prefix`: words before the program, such as `ip netns exec NAME`.
  Process(const std::string& role, const Variables& variables, const std::vector<std::string>& prefix = {});
  ~Process();
  Process(Process&& other) noexcept;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const;
  // Until `text` stands in the output; false when the process ended, or the limit passed, without it.
  bool wait_for(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(20 * patience));
  // Exit code, or minus the signal that ended it; -1000 when it still ran at the limit.
  int join(std::chrono::seconds limit = std::chrono::seconds(30 * patience));
  const std::string& output() const { return output_; }
  pid_t pid() const { return started_; }
  // What it was given by that name.
  const std::string& variable(const std::string& name) const { return variables_.at(name); }

 private:
  bool read_some(std::chrono::milliseconds limit);

  pid_t pid_ = -1;  // while it runs
  pid_t started_ = -1;
  Variables variables_;
  int pipe_ = -1;
  std::string output_;
};

// Who a process is that meets the others at a port of this machine.
Variables at_port(const Port& port, int rank, int size);

// `size` processes in one role, with RANK, WORLD_SIZE and a rendezvous on this machine.
std::vector<Process> start_ranks(const std::string& role, int size, const Variables& variables = {});

double seconds_since(std::chrono::steady_clock::time_point begin);

// Kills rank `victim` of ranks that wait for each other: all others must say so (`words`) and end, within `seconds`.
void expect_named_when_killed(std::vector<Process>& ranks, int victim, double seconds, const std::string& words);

// The roles; in roles.cpp.
int play(const std::string& role);

}  // namespace plumb::testing

// Linux's answers to what a process knows about itself.
#include "cli/process.h"

#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

namespace plumb::cli {

namespace {

// VmHWM rather than getrusage: the latter survives exec, and a rank would report its launcher's memory.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key, 0) == 0) return std::strtoll(line.c_str() + key.size(), nullptr, 10) * 1024;
  }
  return 0;
}

std::atomic<int> noted{0};
std::atomic<int64_t> noted_at{0};

void note(int signal) {
  if (noted.exchange(signal) == 0) {
    noted_at = now_ms();
  } else if (error_fd() < 0 && now_ms() - noted_at >= kSameWish) {
    _exit(128 + signal);
  }
}

}  // namespace

int64_t rss_bytes() { return status_bytes("VmRSS:"); }
int64_t peak_rss_bytes() { return status_bytes("VmHWM:"); }

int64_t usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

int64_t now_ms() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
}

void heed_signals() {
  for (const int number : {SIGINT, SIGTERM}) {
    struct sigaction now{};
    if (sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) signal(number, SIG_DFL);
  }
  signal(SIGXFSZ, SIG_IGN);
}

void note_signals() {
  error_fd();  // reads the environment now: a signal handler must not
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

int noted_signal() { return noted.load(); }

int64_t environment_number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  const std::string_view digits = text ? text : "";
  int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), number);
  return error == std::errc() && end == digits.end() ? number : otherwise;
}

int error_fd() {
  static const int fd = static_cast<int>(environment_number(kErrorFd, -1));
  return fd;
}

}  // namespace plumb::cli

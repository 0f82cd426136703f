// A parent and its ranks: one pipe per rank for the error it ends with, and signals passed on.
#include "cli/launch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cli/process.h"
#include "plumb/error.h"
#include "watch/report.h"
#include "watch/road.h"
#include "world/environment.h"

namespace plumb::cli {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

struct Rank {
  pid_t pid = 0;
  int errors = -1;      // read end of its pipe; -1 once closed
  std::string message;  // what it wrote there
  bool ended = false;
  int status = 0;        // of waitpid
  bool accused = false;  // failed before we ended anybody
  int stopped = 0;       // the signal that stopped it, until it goes on
  Clock::time_point stopped_at{};
};

// A port of this machine where the ranks meet, bound until rank 0 serves it.
class Meeting {
 public:
  Meeting();
  ~Meeting() { leave(); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  int fd() const { return fd_; }
  int port() const { return port_; }
  // To rank 0 alone: nobody is to be let in once that has ended.
  void leave() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
  int port_ = 0;
};

Meeting::Meeting() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool ok = fd_ >= 0 && bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                  getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (!ok) {
    const int error = errno;
    leave();
    throw Error(std::string("no free port on this machine: ") + std::strerror(error));
  }
  port_ = ntohs(address.sin_port);
}

// In the child, until exec: only calls that are safe after fork. Until the rank listens itself, a signal ends it: one that
// our handlers caught, or that was ignored, would be lost.
[[noreturn]] void become_rank(pid_t parent, const sigset_t& mask, char** argv, char** environment) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  for (const int number : {SIGINT, SIGTERM, SIGCHLD}) signal(number, SIG_DFL);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execve("/proc/self/exe", argv, environment);
  _exit(127);
}

Rank start(int64_t rank, int64_t ranks, const Meeting& meeting, int board, char** argv) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error(std::string("cannot make a pipe: ") + std::strerror(errno));
  std::vector<std::string> set = {"RANK=" + std::to_string(rank),
                                  "WORLD_SIZE=" + std::to_string(ranks),
                                  "LOCAL_RANK=" + std::to_string(rank),
                                  "LOCAL_WORLD_SIZE=" + std::to_string(ranks),
                                  "MASTER_ADDR=127.0.0.1",
                                  "MASTER_PORT=" + std::to_string(meeting.port()),
                                  std::string(kStoreFd) + "=" + std::to_string(meeting.fd()),
                                  "PLUMB_JOB=" + std::to_string(getpid()) + "-" + std::to_string(meeting.port()),
                                  std::string(kBoardFd) + "=" + std::to_string(board),
                                  std::string(kErrorFd) + "=" + std::to_string(ends[1])};
  std::vector<char*> environment;
  for (char** old = environ; *old; ++old) {
    const std::string name(*old, std::strcspn(*old, "=") + 1);
    // A torchrun that we run under serves its store to its own ranks, not to ours.
    bool replaced = name.rfind("TORCHELASTIC_", 0) == 0;
    for (const auto& ours : set) replaced |= ours.compare(0, name.size(), name) == 0;
    if (!replaced) environment.push_back(*old);
  }
  for (auto& ours : set) environment.push_back(ours.data());
  environment.push_back(nullptr);

  const pid_t parent = getpid();
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);  // our handlers must not run in the child
  const pid_t pid = fork();
  if (pid == 0) {
    fcntl(ends[1], F_SETFD, 0);
    fcntl(board, F_SETFD, 0);
    if (rank == 0) fcntl(meeting.fd(), F_SETFD, 0);
    become_rank(parent, before, argv, environment.data());
  }
  const int error = errno;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    throw Error("cannot start rank " + std::to_string(rank) + ": " + std::strerror(error));
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  Rank started;
  started.pid = pid;
  started.errors = ends[0];
  return started;
}

void drain(Rank& rank) {
  char buffer[4096];
  for (;;) {
    const ssize_t n = read(rank.errors, buffer, sizeof(buffer));
    if (n > 0) {
      rank.message.append(buffer, static_cast<size_t>(n));
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else {
      if (n == 0) {
        close(rank.errors);
        rank.errors = -1;
      }
      return;
    }
  }
}

bool asked_to_stop(int status) {
  return WIFEXITED(status) && (WEXITSTATUS(status) == 128 + SIGINT || WEXITSTATUS(status) == 128 + SIGTERM);
}

bool failed(const Rank& rank) {
  return rank.ended && !asked_to_stop(rank.status) && !(WIFEXITED(rank.status) && WEXITSTATUS(rank.status) == 0);
}

int blame(const Rank& rank) { return WIFSIGNALED(rank.status) ? 2 : rank.message.starts_with(kConsequence) ? 0 : 1; }

// What a rank said, without who is to blame.
std::string words_of(const Rank& rank) {
  const bool marked = rank.message.starts_with(kConsequence);
  return without_prefix(marked ? rank.message.substr(1) : rank.message);
}

// What each of the others was doing, as far as a line has room.
std::string places(const Board& board, size_t count, size_t culprit) {
  constexpr size_t kMost = 8;
  std::string text;
  size_t told = 0;
  for (size_t r = 0; r < count; ++r) {
    const std::string place = describe(board.of(static_cast<int64_t>(r)));
    if (r == culprit || place.empty() || ++told > kMost) continue;
    text += "; rank " + std::to_string(r) + " was " + place;
  }
  return told > kMost ? text + "; and " + std::to_string(told - kMost) + " more" : text;
}

// Tells who is at fault, and returns the exit code. A rank that was killed is at fault before one that reported an error, and that before one that reported another's; among
// these, the first to report. `stop` is the signal that ended the run, or 0: a run that was to stop did, and a rank that
// failed meanwhile is told beside it.
int verdict(const std::vector<Rank>& ranks, const std::vector<size_t>& order, int stop, const Board& board) {
  const auto unheeding = [stop](const Rank& rank) { return WIFSIGNALED(rank.status) && WTERMSIG(rank.status) == stop; };
  // A rank that did not listen yet is ended by the signal itself, and the others may complain that it is gone.
  if (stop != 0 && std::any_of(ranks.begin(), ranks.end(), unheeding)) return 128 + stop;
  const auto stopped_or = [stop](int code) { return stop != 0 ? 128 + stop : code; };
  const Rank* culprit = nullptr;
  size_t number = 0;
  for (const size_t r : order) {
    if (!ranks[r].accused || !failed(ranks[r])) continue;
    if (!culprit || blame(ranks[r]) > blame(*culprit)) {
      culprit = &ranks[r];
      number = r;
    }
  }
  if (!culprit) {
    for (const Rank& rank : ranks) {
      if (asked_to_stop(rank.status)) return WEXITSTATUS(rank.status);
    }
    for (const Rank& rank : ranks) {
      if (rank.status != 0) return stopped_or(1);
    }
    return stopped_or(0);
  }
  const std::string who = "rank " + std::to_string(number);
  const std::string place = describe(board.of(static_cast<int64_t>(number)));
  const std::string others = places(board, ranks.size(), number);
  if (culprit->stopped != 0 && WIFSIGNALED(culprit->status)) {
    std::string said;  // by who waited for it
    for (const size_t r : order) {
      if (said.empty() && !ranks[r].message.empty()) said = " [" + words_of(ranks[r]) + "]";
    }
    std::fprintf(stderr, "plumb: %s was stopped by signal %d (%s) and did not go on%s%s%s%s\n", who.c_str(),
                 culprit->stopped, strsignal(culprit->stopped), place.empty() ? "" : ", ", place.c_str(),
                 others.c_str(), said.c_str());
    return stopped_or(1);
  }
  if (WIFSIGNALED(culprit->status)) {
    const int signal = WTERMSIG(culprit->status);
    std::fprintf(stderr, "plumb: %s was ended by signal %d (%s)%s%s%s\n", who.c_str(), signal, strsignal(signal),
                 place.empty() ? "" : ", ", place.c_str(), others.c_str());
    return stopped_or(1);
  }
  const int code = WEXITSTATUS(culprit->status);
  std::string message = words_of(*culprit);
  if (message.empty()) message = "ended with exit code " + std::to_string(code);
  if (message.rfind("rank ", 0) != 0) message = who + ": " + message;
  std::fprintf(stderr, "plumb: %s\n", message.c_str());
  return stopped_or(code);
}

std::atomic<int> heard_at{-1};  // where the handler writes

void hear(int signal) {
  const int saved = errno;
  const char byte = static_cast<char>(signal);
  [[maybe_unused]] const auto n = write(heard_at, &byte, 1);
  errno = saved;
}

}  // namespace

Signals::Signals() {
  if (pipe2(ends_, O_CLOEXEC | O_NONBLOCK) != 0)
    throw Error(std::string("cannot make a pipe: ") + std::strerror(errno));
  heard_at = ends_[1];
  struct sigaction action{};
  action.sa_handler = hear;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaction(signal, &action, nullptr);
}

Signals::~Signals() {
  for (const int number : {SIGINT, SIGTERM, SIGCHLD}) signal(number, SIG_DFL);
  close(ends_[0]);
  close(ends_[1]);
}

int Signals::next() const {
  unsigned char byte = 0;
  return read(ends_[0], &byte, 1) == 1 ? byte : 0;
}

int Signals::wish() const {
  for (;;) {
    const int signal = next();
    if (signal != SIGCHLD) return signal;
  }
}

Life launch(int64_t count, char** argv, std::chrono::milliseconds timeout, const Signals& signals) {
  Meeting meeting;
  const Board board(count);
  std::vector<Rank> ranks;
  std::vector<size_t> order;  // in which ranks reported an error or ended; a rank may stand here twice
  const auto kill_all = [&](int signal) {
    for (const Rank& rank : ranks) {
      if (!rank.ended) kill(rank.pid, signal);
    }
  };
  try {
    for (int64_t r = 0; r < count; ++r) ranks.push_back(start(r, count, meeting, board.fd(), argv));
    meeting.leave();
  } catch (...) {
    kill_all(SIGKILL);
    for (const Rank& rank : ranks) waitpid(rank.pid, nullptr, 0);
    throw;
  }

  constexpr auto kGrace = seconds(5);
  auto deadline = Clock::time_point::max();  // when the remaining ranks are ended
  int stop = 0;                              // the signal that asked us to
  int64_t stop_at = 0;
  bool ending = false;
  for (size_t living = ranks.size(); living > 0;) {
    std::vector<pollfd> watched = {{signals.fd(), POLLIN, 0}};
    for (const Rank& rank : ranks) {
      if (rank.errors >= 0) watched.push_back({rank.errors, POLLIN, 0});
    }
    auto until = deadline;
    for (const Rank& rank : ranks) {
      if (rank.stopped != 0 && !rank.ended) until = std::min(until, rank.stopped_at + timeout + kGrace);
    }
    int wait = -1;
    if (until != Clock::time_point::max()) {
      wait = std::max<int>(
          0, static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count() + 1));
    }
    poll(watched.data(), watched.size(), wait);

    while (const int wish = signals.wish()) {
      if (stop == 0) {
        stop = wish;
        stop_at = now_ms();
        kill_all(stop);
      } else if (now_ms() - stop_at >= kSameWish) {  // who asks again does not want to wait
        kill_all(SIGKILL);
        ending = true;
      }
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
      const bool silent = ranks[r].message.empty();
      if (ranks[r].errors >= 0) drain(ranks[r]);
      if (silent && !ranks[r].message.empty()) order.push_back(r);
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
      Rank& rank = ranks[r];
      if (rank.ended || waitpid(rank.pid, &rank.status, WNOHANG | WUNTRACED | WCONTINUED) != rank.pid) continue;
      if (WIFSTOPPED(rank.status) || WIFCONTINUED(rank.status)) {
        rank.stopped = WIFSTOPPED(rank.status) ? WSTOPSIG(rank.status) : 0;
        rank.stopped_at = Clock::now();
        continue;
      }
      rank.ended = true;
      --living;
      if (rank.errors >= 0) drain(rank);
      order.push_back(r);
      rank.accused = !ending;
      if (failed(rank) && deadline == Clock::time_point::max()) deadline = Clock::now() + kGrace;
    }
    // One that is stopped hears nothing: it is not waited for once another has failed, nor when it stays so where nobody
    // waits for it.
    for (Rank& rank : ranks) {
      if (rank.ended || rank.stopped == 0) continue;
      const bool alone = Clock::now() >= rank.stopped_at + timeout + kGrace;
      if (alone || deadline != Clock::time_point::max()) kill(rank.pid, SIGKILL);
    }
    if (living > 0 && Clock::now() >= deadline) {
      kill_all(SIGKILL);
      ending = true;
      deadline = Clock::time_point::max();
    }
  }
  for (const Rank& rank : ranks) {
    if (rank.errors >= 0) close(rank.errors);
  }
  Life life;
  for (const Rank& rank : ranks) {
    if (rank.accused && WIFSIGNALED(rank.status)) ++life.lost;
  }
  life.code = verdict(ranks, order, stop, board);
  return life;
}

}  // namespace plumb::cli

// Descriptors 0 to 2, and the errors of stdout, which stdio keeps as a mere flag.
#include "cli/output.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "plumb/error.h"

namespace plumb::cli {

namespace {

std::atomic<int> reason{0};  // of the first flush that failed

bool reader_left() {
  pollfd end{STDOUT_FILENO, POLLOUT, 0};
  return poll(&end, 1, 0) == 1 && (end.revents & (POLLERR | POLLHUP)) != 0;
}

}  // namespace

void open_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // The lowest free number is this one: those below are open.
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) < 0) return;
  }
}

void flush_output() {
  int none = 0;
  if (std::fflush(stdout) != 0) reason.compare_exchange_strong(none, errno);
}

void check_output() {
  flush_output();
  if (std::ferror(stdout) == 0 || reason == EPIPE || reader_left()) return;
  throw Error("cannot write to stdout" + (reason != 0 ? std::string(": ") + std::strerror(reason) : "") +
              "; what was printed is not complete");
}

}  // namespace plumb::cli

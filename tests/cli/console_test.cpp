// What the bar of a terminal says.
#include "cli/console.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace plumb::cli {

namespace {

// What `body` prints where stdout is a wide terminal.
template <class Body>
std::string on_a_terminal(const Body& body) {
  const int ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  EXPECT_TRUE(ours >= 0 && grantpt(ours) == 0 && unlockpt(ours) == 0);
  const int theirs = open(ptsname(ours), O_RDWR | O_NOCTTY | O_CLOEXEC);
  winsize size{};
  size.ws_col = 200;
  ioctl(theirs, TIOCSWINSZ, &size);
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  dup2(theirs, STDOUT_FILENO);
  body();
  std::fflush(stdout);
  dup2(before, STDOUT_FILENO);
  char text[4096];
  const ssize_t length = read(ours, text, sizeof text);
  for (const int fd : {ours, theirs, before}) close(fd);
  return {text, static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

TEST(Console, TellsTheTimeLeftByTheStepsOfThisLife) {
  Settings settings;
  settings.steps = 100;
  report::Step step;
  step.step = 91;  // the first after a resume
  step.ms = 2'000;
  const std::string said = on_a_terminal([&] { Console(settings, true).step(step); });
  EXPECT_THAT(said, testing::HasSubstr("18.0 s left"));
}

}  // namespace

}  // namespace plumb::cli

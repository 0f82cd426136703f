// Two network namespaces joined by a virtual cable, as two machines are; gone when this ends.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace plumb::testing {

class Cable {
 public:
  Cable() : a_("plumb-a-" + std::to_string(getpid())), b_("plumb-b-" + std::to_string(getpid())) {
    works_ = run("ip netns add " + a_) && run("ip netns add " + b_) &&
             run("ip link add plumb0 netns " + a_ + " type veth peer name plumb0 netns " + b_) &&
             run("ip -n " + a_ + " addr add 10.77.0.1/24 dev plumb0") &&
             run("ip -n " + b_ + " addr add 10.77.0.2/24 dev plumb0") && run("ip -n " + a_ + " link set plumb0 up") &&
             run("ip -n " + b_ + " link set plumb0 up") && run("ip -n " + a_ + " link set lo up") &&
             run("ip -n " + b_ + " link set lo up");
  }
  ~Cable() {
    run("ip netns del " + a_);
    run("ip netns del " + b_);
  }
  bool works() const { return works_; }
  void pull() { EXPECT_TRUE(run("ip -n " + a_ + " link set plumb0 down")); }
  void plug() { EXPECT_TRUE(run("ip -n " + a_ + " link set plumb0 up")); }
  std::vector<std::string> inside(int end) const { return {"ip", "netns", "exec", end == 0 ? a_ : b_}; }

 private:
  static bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }
  std::string a_;
  std::string b_;
  bool works_ = false;
};

// A machine that forbids network namespaces cannot show this; the test says so, and everything else is tested all the same.
#define NEEDS(cable)                                                          \
  if (geteuid() != 0) GTEST_SKIP() << "making network namespaces takes root"; \
  Cable cable;                                                                \
  if (!(cable).works()) GTEST_SKIP() << "this machine does not allow `ip netns` with a veth pair"

}  // namespace plumb::testing

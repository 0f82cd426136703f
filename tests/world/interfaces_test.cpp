// The interface that a user chooses, among those of the machine and two more: "plumb6" has an IPv6 address alone, and "plumb0"
// none. The functions that list them are defined in this program, before the C library's.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "plumb/world.h"
#include "world/support/threads.h"

namespace {

sockaddr_in6 loopback() {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  return address;
}

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

char six_name[] = "plumb6", none_name[] = "plumb0";

// A list of its own, which ends with the system's.
struct List {
  sockaddr_in6 address = loopback();
  ifaddrs without{}, also_without{}, six{};
};

}  // namespace

#define PLUMB_SEEN __attribute__((visibility("default"), used))
extern "C" {
PLUMB_SEEN int getifaddrs(ifaddrs** all) noexcept {
  ifaddrs* rest = nullptr;
  const int result = real<int (*)(ifaddrs**)>("getifaddrs")(&rest);
  if (result != 0) return result;
  auto* list = new List;
  list->without.ifa_name = none_name;
  list->also_without.ifa_name = list->six.ifa_name = six_name;  // an interface has an entry for its hardware, too
  list->six.ifa_addr = reinterpret_cast<sockaddr*>(&list->address);
  list->without.ifa_next = &list->also_without;
  list->also_without.ifa_next = &list->six;
  list->six.ifa_next = rest;
  *all = &list->without;
  return 0;
}
PLUMB_SEEN void freeifaddrs(ifaddrs* all) noexcept {
  const auto free_real = real<void (*)(ifaddrs*)>("freeifaddrs");
  if (all == nullptr || all->ifa_name != none_name) return free_real(all);
  free_real(all->ifa_next->ifa_next->ifa_next);
  delete reinterpret_cast<List*>(reinterpret_cast<char*>(all) - offsetof(List, without));
}
}

namespace plumb::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

class Chosen {
 public:
  explicit Chosen(const std::string& names) { setenv("GLOO_SOCKET_IFNAME", names.c_str(), 1); }
  ~Chosen() { unsetenv("GLOO_SOCKET_IFNAME"); }
};

// What two ranks threw that meet and connect.
std::vector<std::string> joined() {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  return on_threads(2, [&](int rank) {
    const World world = World::join(store, rank, 2, {.backend = "tcp"});
    world.barrier();
  });
}

TEST(Interface, IsTakenByItsNameWhicheverAddressItHas) {
  for (const char* names : {"lo", "lo,other", "plumb6"}) {  // the last has an IPv6 address alone
    const Chosen chosen(names);
    EXPECT_THAT(joined(), Each(Not(HasSubstr("usable interface")))) << names;
  }
  for (const std::string names : {"nowhere", "plumb0", "nowhere,lo"}) {
    const Chosen chosen(names);
    const auto thrown = joined();
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(thrown[r], "plumb: rank " + std::to_string(r) + ": GLOO_SOCKET_IFNAME=" + names +
                               ": there is no usable interface '" + names.substr(0, names.find(',')) +
                               "'; `ip address` lists them");
    }
  }
}

}  // namespace
}  // namespace plumb::testing

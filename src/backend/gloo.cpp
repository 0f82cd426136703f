// gloo groups from C++: c10d's own class, compiled against stand-ins for gloo's headers (see gloo_shim/).
#include "backend/gloo.h"

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "plumb/error.h"
#include "watch/bounded.h"

namespace plumb {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 13 && defined(__x86_64__)
// What the wheel's own compiler saw. Other sizes mean other headers than the library was built with.
static_assert(sizeof(c10d::ProcessGroupGloo) == 488 && sizeof(c10d::ProcessGroupGloo::Options) == 184,
              "ProcessGroupGloo is not laid out as in torch 2.13: the gloo stand-ins no longer fit");
#endif

}  // namespace

std::vector<c10::intrusive_ptr<c10d::Backend>> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                         int size, std::chrono::milliseconds timeout,
                                                         const std::string& address, int count) {
  using c10d::ProcessGroupGloo;
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME"); names && *names) {
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');) {
      try {
        devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
      } catch (const std::exception&) {
        throw Error(rank, "GLOO_SOCKET_IFNAME=" + std::string(names) + ": there is no usable interface '" + name +
                              "'; `ip address` lists them");
      }
    }
  } else {
    devices.push_back(ProcessGroupGloo::createDeviceForHostname(address));
  }
  // Bounded: gloo tries several times to reach a rank that does not answer, each time for the whole time-out.
  auto groups = bounded(timeout, [=] {
    std::vector<c10::intrusive_ptr<c10d::Backend>> made;
    for (int i = 0; i < count; ++i) {
      auto options = ProcessGroupGloo::Options::create(timeout);
      options->devices = devices;
      made.push_back(c10::make_intrusive<ProcessGroupGloo>(
          c10::make_intrusive<c10d::PrefixStore>("gloo" + std::to_string(i), store), rank, size, options));
    }
    return made;
  });
  if (!groups) throw std::runtime_error("gloo did not reach all ranks within the time-out");
  return std::move(*groups);
}

}  // namespace plumb

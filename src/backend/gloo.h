// gloo groups from C++, on the plain wheel.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace plumb {

// `count` groups of the same ranks over one device: the interfaces in GLOO_SOCKET_IFNAME if set, otherwise the one that
// holds `address`. Each group keeps its own order of collectives.
std::vector<c10::intrusive_ptr<c10d::Backend>> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                         int size, std::chrono::milliseconds timeout,
                                                         const std::string& address, int count);

}  // namespace plumb

// Ranks of the tcp backend that are threads of one process.
#pragma once

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "backend/tcp.h"
#include "world/support/threads.h"

namespace plumb::testing {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr std::chrono::microseconds kPatience{50};

// Runs `body` on `size` threads, each with a backend. Returns what each threw.
inline std::vector<std::string> on_tcp(
    int size, const std::function<void(int rank, const BackendPtr& backend)>& body,
    const c10::intrusive_ptr<c10d::Store>& store = c10::make_intrusive<c10d::HashStore>()) {
  return on_threads(size, [&](int rank) { body(rank, make_tcp_backend(store, rank, size, "127.0.0.1", kPatience)); });
}

inline void expect_all(const at::Tensor& tensor, double value) { EXPECT_TRUE(tensor.eq(value).all().item<bool>()); }

}  // namespace plumb::testing

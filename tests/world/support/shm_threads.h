// Ranks of the shm backend that are threads of one process, which the sanitizers see.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "plumb/error.h"
#include "world/shm_ring.h"

namespace plumb::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int slowness = 10;
#else
constexpr int slowness = 1;
#endif

// Makes the n-th group.
using ShmGroups = std::function<c10::intrusive_ptr<c10d::Backend>(int64_t serial)>;

// Runs `body` on `size` threads with a heap each. Returns what each rank threw.
inline std::vector<std::string> on_threads(int size,
                                           const std::function<void(int rank, ShmHeap& heap, const ShmGroups&)>& body,
                                           std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> thrown(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        std::string why_not;
        const auto heap = ShmHeap::meet(*store, rank, size, why_not);
        if (!heap) throw Error(rank, why_not);
        body(rank, *heap, [&](int64_t serial) { return make_shm_backend(heap, *store, serial, timeout); });
      } catch (const std::exception& e) {
        thrown[rank] = e.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return thrown;
}

inline void expect_all_well(const std::vector<std::string>& thrown) {
  for (const auto& text : thrown) EXPECT_EQ(text, "");
}

inline c10::intrusive_ptr<c10d::Work> all_reduce(const c10::intrusive_ptr<c10d::Backend>& group,
                                                 const at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  return group->allreduce(one);
}

}  // namespace plumb::testing

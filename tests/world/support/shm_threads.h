// Ranks of the shm backend that are threads of one process, which the sanitizers see.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <string>
#include <vector>

#include "backend/shm_ring.h"
#include "plumb/error.h"
#include "slowness.h"
#include "world/support/threads.h"

namespace plumb::testing {

// Makes the n-th group.
using ShmGroups = std::function<c10::intrusive_ptr<c10d::Backend>(int64_t serial)>;

// Runs `body` on `size` threads with a heap each. Returns what each rank threw.
inline std::vector<std::string> on_threads(int size,
                                           const std::function<void(int rank, ShmHeap& heap, const ShmGroups&)>& body,
                                           std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return on_threads(size, [&](int rank) {
    std::string why_not;
    const auto heap = ShmHeap::meet(*store, rank, size, why_not);
    if (!heap) throw Error(rank, why_not);
    body(rank, *heap, [&](int64_t serial) { return make_shm_backend(heap, *store, serial, timeout); });
  });
}

inline c10::intrusive_ptr<c10d::Work> all_reduce(const c10::intrusive_ptr<c10d::Backend>& group,
                                                 const at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  return group->allreduce(one);
}

}  // namespace plumb::testing

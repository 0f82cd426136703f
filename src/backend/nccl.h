// NCCL groups, where libtorch has them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace plumb {

// Whether this build can make NCCL groups.
bool has_nccl();

// A group on the CUDA device `local_rank`. Throws Error when this build has no NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            int local_rank, std::chrono::milliseconds timeout);

}  // namespace plumb

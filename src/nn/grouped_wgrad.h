// The grouped weight gradient as one CUDA kernel, behind plain pointers: no libtorch here.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace plumb::kernel {

struct GroupedWgrad {
  const void* dy = nullptr;       // bf16 [rows, out], rows of group after group
  const void* x = nullptr;        // bf16 [rows, in]
  const int32_t* ends = nullptr;  // on the device: rows [ends[g-1], ends[g]) belong to group g
  float* const* sums = nullptr;   // on the host: one f32 [out, in] buffer per group
  int groups = 0;
  int64_t rows = 0, out = 0, in = 0;
  bool accumulate = false;  // sums += dyᵀx, otherwise sums = dyᵀx, exact zeros for a group without rows
};

// Whether the kernel takes this problem: alignment for the copy engine, a Hopper device.
bool grouped_wgrad_fits(const GroupedWgrad& problem);

// Enqueues it on `stream`. Null, or what went wrong. `variant` 0 or 1: wide or square tiles, for measuring;
// otherwise the sizes choose.
const char* grouped_wgrad(const GroupedWgrad& problem, CUstream_st* stream, int variant = -1);

}  // namespace plumb::kernel

// Token counts on the device, turned into ends and checked there, behind plain pointers: no libtorch here.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace plumb::kernel {

// What a kernel found wrong, told to the host without making it wait: memory that both see, empty until then.
struct Complaint {
  int64_t expert = -1;  // the one with a wrong count; -1: only the sum is wrong
  int64_t found = 0;    // its count, or the sum
  int64_t rows = 0;     // of the input
  int32_t made = 0;     // written last: there is a complaint
};

struct TokenEnds {
  const void* counts = nullptr;  // on the device: int64 [experts], sizes or running sums
  bool are_ends = false;
  int64_t experts = 0, rows = 0;
  int32_t* ends = nullptr;         // on the device; for wrong counts: every row is the last expert's
  Complaint* complaint = nullptr;  // for wrong counts
};

// Whether the current device runs this library's kernels.
bool runs_here();

// Memory for a complaint, or null.
Complaint* new_complaint();

// Enqueues it on `stream`. Null, or what went wrong.
const char* token_ends(const TokenEnds& problem, CUstream_st* stream);

}  // namespace plumb::kernel

// One block: running sums of the counts, chunk by chunk, and whether they can be the rows of the input.
#include <cuda_runtime.h>

#include <climits>

#include "nn/token_ends.h"

namespace plumb::kernel {
namespace {

constexpr int threads = 256;
constexpr int right = INT_MAX;

__global__ void __launch_bounds__(threads) token_ends_kernel(TokenEnds p) {
  __shared__ int64_t sums[threads];
  __shared__ int first_wrong;
  const auto* const counts = static_cast<const int64_t*>(p.counts);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 0) first_wrong = right;
  int64_t before = 0;  // the end of the chunk before
  for (int64_t chunk = 0; chunk < p.experts; chunk += threads) {
    const int64_t e = chunk + lane;
    int64_t size = 0;
    if (e < p.experts) size = counts[e] - (p.are_ends && e > 0 ? counts[e - 1] : 0);
    const bool wrong = size < 0 || size > p.rows;
    __syncthreads();  // the sums of the chunk before have been read, and first_wrong is set
    if (wrong) atomicMin(&first_wrong, static_cast<int>(e));
    sums[lane] = wrong ? 0 : size;  // so that no sum overflows
    for (int reach = 1; reach < threads; reach *= 2) {
      __syncthreads();
      const int64_t more = lane >= reach ? sums[lane - reach] : 0;
      __syncthreads();
      sums[lane] += more;
    }
    const int64_t end = before + sums[lane];
    if (e < p.experts) p.ends[e] = static_cast<int32_t>(end < p.rows ? end : p.rows);
    __syncthreads();
    before += sums[threads - 1];
  }
  __syncthreads();
  if (first_wrong == right && before == p.rows) return;
  for (int64_t e = lane; e < p.experts; e += threads) p.ends[e] = e + 1 == p.experts ? static_cast<int32_t>(p.rows) : 0;
  if (lane != 0) return;
  const int64_t e = first_wrong;
  const bool one = first_wrong != right;
  p.complaint->expert = one ? e : -1;
  p.complaint->found = one ? counts[e] - (p.are_ends && e > 0 ? counts[e - 1] : 0) : before;
  p.complaint->rows = p.rows;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&p.complaint->made) = 1;
}

}  // namespace

bool runs_here() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

Complaint* new_complaint() {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, sizeof(Complaint), cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return new (memory) Complaint;
}

const char* token_ends(const TokenEnds& p, CUstream_st* stream) {
  token_ends_kernel<<<1, threads, 0, stream>>>(p);
  const auto e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace plumb::kernel

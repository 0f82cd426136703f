#include "engine/host_memory.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

namespace plumb {
namespace {

constexpr uintptr_t kLargePage = 2 << 20;

// Advice: where it is not taken, nothing is lost.
void prefer_large_pages(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = (begin + tensor.nbytes()) / kLargePage * kLargePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace

at::Tensor host_memory(int64_t elements, at::ScalarType dtype) {
  at::Tensor memory = at::empty({elements}, at::device(at::kCPU).dtype(dtype));
  prefer_large_pages(memory);
  return memory;
}

}  // namespace plumb

#include "engine/host_memory.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace plumb {
namespace {

constexpr uintptr_t kLargePage = 2 << 20;
constexpr int64_t kAligned = 64;
constexpr int64_t kBlock = 1 << 20;  // bytes that one thread copies at a time

// Advice: where it is not taken, nothing is lost.
void prefer_large_pages(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = (begin + tensor.nbytes()) / kLargePage * kLargePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

struct Block {
  const char* from;
  char* to;
  int64_t bytes;
};

}  // namespace

at::Tensor host_memory(int64_t elements, at::ScalarType dtype) {
  at::Tensor memory = at::empty({elements}, at::device(at::kCPU).dtype(dtype));
  prefer_large_pages(memory);
  return memory;
}

void Snapshot::take(const std::vector<at::Tensor*>& tensors) {
  int64_t total = 0;
  bool pinned = false;
  for (const at::Tensor* tensor : tensors) {
    total += (static_cast<int64_t>(tensor->nbytes()) + kAligned - 1) / kAligned * kAligned;
    pinned = pinned || tensor->is_cuda();
  }
  if (!memory_.defined() || memory_.numel() < total || (pinned && !memory_.is_pinned())) {
    memory_.reset();
    memory_ = pinned ? at::empty({total}, at::device(at::kCPU).dtype(at::kByte).pinned_memory(true))
                     : host_memory(total, at::kByte);
  }
  std::vector<Block> blocks;
  std::vector<at::Tensor> copies;  // the originals must live until they are copied
  std::vector<c10::Device> busy;
  int64_t at = 0;
  for (const at::Tensor* tensor : tensors) {
    const auto bytes = static_cast<int64_t>(tensor->nbytes());
    const at::Tensor copy = memory_.narrow(0, at, bytes).view(tensor->scalar_type());
    at += (bytes + kAligned - 1) / kAligned * kAligned;
    if (tensor->is_cpu() && tensor->is_contiguous()) {
      const auto* from = static_cast<const char*>(tensor->const_data_ptr());
      auto* to = static_cast<char*>(copy.mutable_data_ptr());
      for (int64_t i = 0; i < bytes; i += kBlock) blocks.push_back({from + i, to + i, std::min(kBlock, bytes - i)});
    } else {
      copy.copy_(*tensor, /*non_blocking=*/true);
      if (std::find(busy.begin(), busy.end(), tensor->device()) == busy.end()) busy.push_back(tensor->device());
    }
    copies.push_back(copy);
  }
  at::parallel_for(0, static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Block& block = blocks[static_cast<size_t>(i)];
      std::memcpy(block.to, block.from, static_cast<size_t>(block.bytes));
    }
  });
  for (const c10::Device& device : busy) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
  for (size_t i = 0; i < tensors.size(); ++i) *tensors[i] = copies[i];
}

}  // namespace plumb

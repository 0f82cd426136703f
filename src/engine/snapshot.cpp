#include "engine/snapshot.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "engine/host_memory.h"

namespace plumb {
namespace {

constexpr int64_t kAligned = 64;
constexpr size_t kBlock = 1 << 20;    // bytes that one thread copies at a time
constexpr int64_t kThread = 4 << 20;  // bytes for which another thread is worth its start
constexpr int64_t kThreads = 8;

int64_t room_of(const at::Tensor& tensor) {
  return (static_cast<int64_t>(tensor.nbytes()) + kAligned - 1) / kAligned * kAligned;
}

// `to` is aligned. Past the caches, where the processor can: nobody reads the copy soon, memory is not read before it is
// written, and what is being trained stays where it is.
void copy(char* to, const char* from, size_t bytes) {
  size_t at = 0;
#ifdef __SSE2__
  for (; at + kAligned <= bytes; at += kAligned) {
    for (size_t i = at; i < at + kAligned; i += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
  }
  _mm_sfence();
#endif
  std::memcpy(to + at, from + at, bytes - at);
}

// As many threads as torch may use.
void work_together(Copying& copying) {
  const int64_t count = std::min({int64_t{at::get_num_threads()}, kThreads, copying.bytes() / kThread});
  std::vector<std::thread> others;
  try {
    while (static_cast<int64_t>(others.size()) + 1 < count) others.emplace_back([&] { copying.work(); });
  } catch (const std::system_error&) {  // there are no more threads: these do
  }
  copying.work();
  for (std::thread& other : others) other.join();
}

}  // namespace

void Copying::add(const at::Tensor& from, const at::Tensor& to) {
  const auto* begin = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  for (size_t at = 0; at < from.nbytes(); at += kBlock) {
    blocks_.push_back({begin + at, target + at, std::min(kBlock, from.nbytes() - at)});
  }
  bytes_ += static_cast<int64_t>(from.nbytes());
  tensors_.insert(tensors_.end(), {from, to});
}

void Copying::work() {
  for (size_t i = next_++; i < blocks_.size(); i = next_++) {
    copy(blocks_[i].to, blocks_[i].from, blocks_[i].bytes);
    if (++copied_ == blocks_.size()) copied_.notify_all();
  }
  for (size_t done = copied_; done < blocks_.size(); done = copied_) copied_.wait(done);
}

void Copying::clear() {
  blocks_.clear();
  tensors_.clear();
  bytes_ = 0;
  next_ = copied_ = 0;
}

void Snapshot::take(const std::vector<at::Tensor*>& now, const std::vector<at::Tensor*>& later) {
  rest_.clear();
  int64_t total = 0;
  bool pinned = false;
  for (const auto* tensors : {&now, &later}) {
    for (const at::Tensor* tensor : *tensors) {
      total += room_of(*tensor);
      pinned = pinned || tensor->is_cuda();
    }
  }
  if (!memory_.defined() || memory_.numel() < total || (pinned && !memory_.is_pinned())) {
    memory_.reset();
    memory_ = pinned ? at::empty({total}, at::device(at::kCPU).dtype(at::kByte).pinned_memory(true))
                     : host_memory(total, at::kByte);
  }
  Copying at_once;
  std::vector<at::Tensor> originals;  // live until they are copied
  std::vector<c10::Device> busy;
  int64_t at = 0;
  const auto place = [&](at::Tensor& tensor, Copying& copying) {
    const at::Tensor copy = memory_.narrow(0, at, static_cast<int64_t>(tensor.nbytes())).view(tensor.scalar_type());
    at += room_of(tensor);
    if (tensor.is_cpu() && tensor.is_contiguous()) {
      copying.add(tensor, copy);
    } else {
      copy.copy_(tensor, /*non_blocking=*/true);
      if (std::find(busy.begin(), busy.end(), tensor.device()) == busy.end()) busy.push_back(tensor.device());
      originals.push_back(tensor);
    }
    tensor = copy;
  };
  for (at::Tensor* tensor : now) place(*tensor, at_once);
  for (at::Tensor* tensor : later) place(*tensor, rest_);
  work_together(at_once);
  for (const c10::Device& device : busy) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
}

}  // namespace plumb

#include "engine/snapshot.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/COW.h>
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
constexpr size_t kHeld = 64 << 10;  // bytes for which holding memory is worth what it costs

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

void Copying::add(const char* from, const at::Tensor& to) {
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  for (size_t at = 0; at < to.nbytes(); at += kBlock) {
    blocks_.push_back({from + at, target + at, std::min(kBlock, to.nbytes() - at)});
  }
  bytes_ += static_cast<int64_t>(to.nbytes());
  tensors_.push_back(to);
}

void Copying::add(const at::Tensor& from, const at::Tensor& to) {
  add(static_cast<const char*>(from.const_data_ptr()), to);
  tensors_.push_back(from);
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

const char* Held::hold(const at::Tensor& tensor) {
  c10::StorageImpl& owners = *tensor.storage().unsafeGetStorageImpl();
  auto found = memories_.find(&owners);
  if (found == memories_.end()) {
    auto ours = c10::impl::cow::lazy_clone_storage(owners);
    if (ours == nullptr) return nullptr;
    found = memories_.emplace(&owners, Memory{tensor.storage(), std::move(ours)}).first;
  }
  return static_cast<const char*>(found->second.ours->data()) +
         tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

void Held::let_go() {
  for (auto& [_, memory] : memories_) {
    memory.ours.reset();
    // Nobody else holds it, so that this copies nothing: kernels that write from several threads find plain memory.
    memory.owners.mutable_data();
  }
  memories_.clear();
}

void Snapshot::take(const ToCopy& tensors) {
  let_go();
  int64_t total = 0;
  bool pinned = false;
  for (const auto* all : {&tensors.now, &tensors.held, &tensors.later}) {
    for (const at::Tensor* tensor : *all) {
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
  const auto is_plain = [](const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_contiguous(); };
  const auto place = [&](at::Tensor& tensor, Copying& copying, const char* held) {
    const at::Tensor copy = memory_.narrow(0, at, static_cast<int64_t>(tensor.nbytes())).view(tensor.scalar_type());
    at += room_of(tensor);
    if (held != nullptr) {
      copying.add(held, copy);
    } else if (is_plain(tensor)) {
      copying.add(tensor, copy);
    } else {
      copy.copy_(tensor, /*non_blocking=*/true);
      if (std::find(busy.begin(), busy.end(), tensor.device()) == busy.end()) busy.push_back(tensor.device());
      originals.push_back(tensor);
    }
    tensor = copy;
  };
  for (at::Tensor* tensor : tensors.now) place(*tensor, at_once, nullptr);
  for (at::Tensor* tensor : tensors.held) {
    const char* held = is_plain(*tensor) && tensor->nbytes() >= kHeld ? held_.hold(*tensor) : nullptr;
    place(*tensor, held != nullptr ? rest_ : at_once, held);
  }
  for (at::Tensor* tensor : tensors.later) place(*tensor, rest_, nullptr);
  work_together(at_once);
  for (const c10::Device& device : busy) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
}

void Snapshot::settle() {
  finish();
  held_.let_go();
}

void Snapshot::let_go() {
  rest_.clear();
  held_.let_go();
}

}  // namespace plumb

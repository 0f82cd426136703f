// Waiting: move on what can be moved, keep the core for a moment, then sleep until somebody rings.
#include "backend/shm_work.h"

#include <algorithm>

#include "plumb/error.h"

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds slice{10};  // of sleep, before a look at who has died

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ShmWork::ShmWork(std::shared_ptr<ShmRing> ring, int rank, Verb verb, uint64_t last, std::chrono::milliseconds timeout)
    : Work(rank, type_of(verb)), ring_(std::move(ring)), verb_(verb), last_(last), timeout_(timeout) {}

void ShmWork::end(const std::exception_ptr& failure) {
  {
    std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = failure;
  }
  ended_.store(true, std::memory_order_release);
}

bool ShmWork::isCompleted() {
  if (!ended_.load(std::memory_order_acquire)) ring_->heap().advance_all();
  return ended_.load(std::memory_order_acquire);
}

bool ShmWork::outcome() {
  std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
  const auto end = Clock::now() + limit;
  ShmHeap& heap = ring_->heap();
  const auto ready = [&] { return isCompleted(); };
  for (;;) {
    if (ready()) return outcome();
    for (const auto spin = Clock::now() + heap.patience(); Clock::now() < spin;) {
      for (int i = 0; i < 16; ++i) pause_core();
      ring_->advance();
      if (ended_.load(std::memory_order_acquire)) return outcome();
    }
    const auto left = end - Clock::now();
    if (left <= left.zero()) {
      throw Error(ring_->me(), "waited " + std::to_string(limit.count()) + " ms in " + name_of(verb_) + " for " +
                                   ring_->missing(last_));
    }
    if (!heap.sleep(std::min<std::chrono::nanoseconds>(left, slice), ready)) ring_->look_for_the_dead(last_);
  }
}

}  // namespace plumb

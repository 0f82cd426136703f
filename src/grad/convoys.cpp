// Convoys: when reductions begin, and which of them travel as one message. Small neighbours do where messages are dear; all
// others travel alone.
#include <algorithm>
#include <utility>

#include "grad/reducer.h"

namespace plumb {
namespace {

constexpr int64_t kTogether = 512 << 10;  // bytes of one message

}  // namespace

// From what every rank knows alike: all ranks must send the same messages.
void Reducer::form_convoys() {
  const bool dear = shards_gradient_ && !deterministic_ && groups_.shard.messages_are_dear();
  const int64_t limit = std::min(kTogether, static_cast<int64_t>(options_.bucket_bytes));
  int64_t bytes = 0;
  int convoy = -1;
  bool closed = true;
  for (Bucket& bucket : buckets_) {
    const int64_t more = bucket.numel * static_cast<int64_t>(sizeof(float));
    bucket.alone = !dear || !bucket.device().is_cpu() || more > limit;
    if (closed || bucket.alone || bytes + more > limit) {
      ++convoy;
      bytes = 0;
    }
    bucket.convoy = convoy;
    bytes += more;
    closed = bucket.alone;
  }
}

size_t Reducer::end_of_convoy(size_t begin) const {
  size_t end = begin + 1;
  while (end < buckets_.size() && buckets_[end].convoy == buckets_[begin].convoy) ++end;
  return end;
}

// In bucket order. The last convoy stays until the backward has ended: its last gradient comes then anyway.
void Reducer::launch_ready() {
  if (hold_launches_) return;
  while (next_ < buckets_.size()) {
    const size_t end = end_of_convoy(next_);
    if (end == buckets_.size()) return;
    for (size_t i = next_; i < end; ++i) {
      if (buckets_[i].waiting > 0) return;
    }
    launch_convoy();
  }
}

void Reducer::launch_convoy() {
  for (const size_t end = end_of_convoy(next_); next_ < end; ++next_) {
    if (!buckets_[next_].launched) reduce(buckets_[next_]);
  }
  send_waiting();
}

void Reducer::send_waiting() {
  if (!outgoing_.empty()) send(std::exchange(outgoing_, {}));
}

// As one message.
void Reducer::send(const std::vector<Bucket*>& buckets) {
  std::vector<Group::Part> parts;
  for (const Bucket* bucket : buckets) parts.push_back({bucket->target(), bucket->incoming});
  const auto message = std::make_shared<Pending>(groups_.shard.reduce_scatter(parts));
  for (Bucket* bucket : buckets) {
    bucket->reduction = message;
    in_flight_.push_back(bucket);
  }
}

}  // namespace plumb

#include "grad/traffic.h"

#include <algorithm>

#include "layout/at_a_time.h"

namespace plumb {

void Traffic::form_convoys(int64_t bucket_bytes) {
  int64_t bytes = 0;
  int convoy = -1;
  bool closed = true;
  for (Bucket& bucket : buckets_) {
    const int64_t more = bucket.numel * static_cast<int64_t>(sizeof(float));
    const int64_t limit = summing_.together(bucket.device(), bucket_bytes);
    bucket.alone = limit == 0 || more > limit;
    if (closed || bucket.alone || bytes + more > limit) {
      ++convoy;
      bytes = 0;
    }
    bucket.convoy = convoy;
    bytes += more;
    closed = bucket.alone;
  }
}

size_t Traffic::end_of_convoy(size_t begin) const {
  size_t end = begin + 1;
  while (end < buckets_.size() && buckets_[end].convoy == buckets_[begin].convoy) ++end;
  return end;
}

void Traffic::launch_ready(const Where& where) {
  if (held_) return;
  while (next_ < buckets_.size()) {
    if (buckets_[next_].waiting > 0) return;  // so it is for most gradients
    const size_t end = end_of_convoy(next_);
    if (end == buckets_.size()) return;
    for (size_t i = next_; i < end; ++i) {
      if (buckets_[i].waiting > 0) return;
    }
    launch_convoy(where);
  }
}

void Traffic::launch_rest(const Where& where) { launch_up_to(buckets_.size(), where); }

void Traffic::launch_up_to(size_t end, const Where& where) {
  while (next_ < end) launch_convoy(where);
}

void Traffic::launch_convoy(const Where& where) {
  for (const size_t end = end_of_convoy(next_); next_ < end; ++next_) {
    if (!buckets_[next_].launched && !buckets_[next_].frozen) begin(buckets_[next_], where);
  }
  summing_.send();
}

void Traffic::launch(Bucket& bucket, const Where& where) {
  begin(bucket, where);
  summing_.send();
}

void Traffic::begin(Bucket& bucket, const Where& where) {
  at::NoGradGuard no_grad;
  road_.pass(Point::reduce, where.step, where.pass, bucket.index);
  bucket.launched = true;
  bucket.made_up = false;
  if (fault_ == Fault::reduce_never && bucket.index == 0) return;
  bucket.under_way = true;
  bucket.begun = std::chrono::steady_clock::now();
  const Alone alone(bucket.lanes, bucket.device());  // contract 2: a reduction waits for every producer
  summing_.begin(bucket, where);
}

void Traffic::reduce_and_wait(const std::vector<bool>& which, const Where& where) {
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i]) begin(buckets_[i], where);
  }
  summing_.send();
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i]) summing_.finish(buckets_[i], where);
  }
}

void Traffic::finish_all(const Where& where) {
  for (Bucket& bucket : buckets_) {
    if (!bucket.under_way) continue;
    Where detailed = where;
    detailed.detail = "the reduction of bucket " + std::to_string(bucket.index);
    summing_.finish(bucket, detailed);
  }
}

}  // namespace plumb

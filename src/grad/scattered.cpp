#include "grad/scattered.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "layout/at_a_time.h"

namespace plumb {
namespace {

constexpr size_t kSmallSpare = 1 << 20;  // bytes that may stay between steps

}  // namespace

int64_t Scattered::together(c10::Device device, int64_t bucket_bytes) const {
  return device.is_cpu() && team_.shard().messages_are_dear() ? std::min(kTogether, bucket_bytes) : 0;
}

// Several ranks hold a piece where there are replicas: each of them gives its part of it to the next sum, or none does. So all of
// them make what they hold whole, also where this pass brings nothing.
void Scattered::open_pass(const OpenPass& pass, int64_t /*number*/, std::deque<Sink>& sinks) {
  if (collects(pass) || !crosses()) return;
  at::NoGradGuard no_grad;
  for (Sink& sink : sinks) {
    if (!sink.grad_in_bucket() && !sink.piece_elsewhere()) continue;
    Bucket& bucket = buckets_.of(sink);
    bucket.lanes.begin_part(bucket.device(), sink.index);
    at::Tensor apart;
    try {
      apart = take_apart(sink);
      take_in(sink);
    } catch (...) {
      note_failure();
    }
    if (sink.grad_in_bucket()) sink.make_whole(bucket.kept, team_.mesh().shard);
    if (apart.defined()) sink.grad().add_(apart);
    bucket.lanes.end_part(bucket.device(), sink.index);
  }
}

at::Tensor Scattered::memory_for(const Bucket& bucket) {
  keep_few_in_flight();
  const c10::Device device = bucket.device();
  const Alone alone(const_cast<Bucket&>(bucket).lanes, device);  // memory is first the lane's that asked for it
  const auto spare = std::find_if(spares_.begin(), spares_.end(), [&](const at::Tensor& one) {
    return one.numel() >= bucket.numel && one.scalar_type() == bucket.dtype && one.device() == device;
  });
  if (spare != spares_.end()) {
    at::Tensor memory = *spare;
    spares_.erase(spare);
    return memory;
  }
  if (!bucket.alone) {  // it will be copied into a message
    return at::empty({bucket.numel}, at::TensorOptions().dtype(bucket.dtype).device(device));
  }
  // As large as the next ones will ask for.
  int64_t numel = bucket.numel;
  for (const Bucket& other : buckets_) {
    if (other.dtype == bucket.dtype && other.unit < 0 && bucket.unit < 0) numel = std::max(numel, other.numel);
  }
  return team_.data().allocate(numel, at::TensorOptions().dtype(bucket.dtype).device(device));
}

// Launched buckets end here while the backward goes on, so that their whole gradients are given back at once.
void Scattered::keep_few_in_flight() {
  const auto messages = [this] {
    int64_t count = 0;
    const Pending* last = nullptr;
    for (const Bucket* bucket : in_flight_) {
      if (bucket->reduction.get() != last) ++count;
      last = bucket->reduction.get();
    }
    return count;
  };
  if (never_waits_) return;
  while (messages() >= kScatteredAtATime) cross(sent_at_);
  const size_t crossing = crosses() ? kCrossingAtATime : 0;
  while (crossing_.size() > crossing) finish(*crossing_.front(), sent_at_);
}

// The whole gradient has done its work; its piece goes on to the replicas. In the order in which they began, whoever is
// wanted: every crossing is a collective.
void Scattered::cross(Where where) {
  Bucket& bucket = *in_flight_.front();
  in_flight_.pop_front();
  where.detail = "the reduction of bucket " + std::to_string(bucket.index);
  const Alone alone(bucket.lanes, bucket.device());
  bucket.reduction->wait(where);
  bucket.reduction = std::make_shared<Pending>(team_.replicate().all_reduce(bucket.target()));
  give_back(bucket.incoming);
  crossing_.push_back(&bucket);
}

void Scattered::begin_rest(const Where& where) {
  while (crosses() && !in_flight_.empty()) cross(where);
}

void Scattered::begin(Bucket& bucket, const Where& where) {
  sent_at_ = where;
  buckets_.make_gradient(bucket, bucket.has_gradient() ? Buckets::Blank::yes : Buckets::Blank::no);
  complete_incoming(bucket);
  ledger_.reduced(bucket.index);
  open_target(bucket);
  if (bucket.alone) return send({&bucket});
  outgoing_.push_back(&bucket);
}

void Scattered::send() {
  if (!outgoing_.empty()) send(std::exchange(outgoing_, {}));
}

// As one message.
void Scattered::send(const std::vector<Bucket*>& buckets) {
  std::vector<Group::Part> parts;
  for (const Bucket* bucket : buckets) {
    look_at(bucket->incoming.sum, sent_at_.pass);
    parts.push_back({bucket->target(), bucket->incoming.sum});
  }
  const auto message = std::make_shared<Pending>(team_.shard().reduce_scatter(parts));
  for (Bucket* bucket : buckets) {
    bucket->reduction = message;
    in_flight_.push_back(bucket);
  }
}

void Scattered::finish_before(Bucket& bucket, const Where& where) {
  while (std::find(in_flight_.begin(), in_flight_.end(), &bucket) != in_flight_.end()) cross(where);
  std::erase(crossing_, &bucket);
}

void Scattered::arrived(Bucket& bucket, const Where& /*where*/) { close_target(bucket); }

// Fresh memory costs a fault per page: the next bucket of this step takes this one's.
void Scattered::give_back(Incoming& incoming) {
  if (incoming.memory.device().is_cpu() && spares_.size() < size_t{kScatteredAtATime})
    spares_.push_back(incoming.memory);
  keep_for_current(incoming.sum);
  incoming.sum.reset();
  incoming.memory.reset();
}

void Scattered::finish_step() {
  std::erase_if(spares_, [](const at::Tensor& spare) { return spare.nbytes() > kSmallSpare; });
}

}  // namespace plumb

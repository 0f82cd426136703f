// Gradients that are not summed in place: sharded ones, and all of them in deterministic mode. A contribution is taken
// away from autograd into the bucket's `incoming`, which lives until its reduction; what stays is the reduced sum.
#include <ATen/ATen.h>

#include <algorithm>

#include "grad/reducer.h"

namespace plumb {
namespace {

// Messages of whole gradients on their way at a time: one being filled, one being reduced.
constexpr size_t kInFlight = 2;

// The sum of rows [begin, end) as a binary tree: halves first, then their sum. In place, in row `begin`.
void sum_tree(const std::vector<at::Tensor>& rows, size_t begin, size_t end) {
  if (end - begin < 2) return;
  const size_t middle = begin + (end - begin) / 2;
  sum_tree(rows, begin, middle);
  sum_tree(rows, middle, end);
  rows[begin].add_(rows[middle]);
}

// How many sums of the tree over `count` leaves are complete once leaf `leaf` is there.
int sums_after(int64_t leaf, int64_t begin, int64_t end) {
  if (end - begin < 2) return 0;
  const int64_t middle = begin + (end - begin) / 2;
  const int inside = leaf < middle ? sums_after(leaf, begin, middle) : sums_after(leaf, middle, end);
  return inside + (leaf == end - 1 ? 1 : 0);
}

}  // namespace

void Reducer::open_incoming(Bucket& bucket) {
  if (bucket.incoming.defined()) return;
  if (!deterministic_) keep_few_in_flight();
  const c10::Device device = bucket.device();
  const Alone alone(bucket.lanes, device);  // memory is first the lane's that asked for it
  const auto spare = std::find_if(spares_.begin(), spares_.end(), [&](const at::Tensor& one) {
    return one.numel() >= bucket.numel && one.scalar_type() == bucket.dtype && one.device() == device;
  });
  if (spare != spares_.end()) {
    bucket.lent = *spare;
    spares_.erase(spare);
  } else {
    int64_t numel = bucket.numel;
    if (!deterministic_) {
      for (const Bucket& other : buckets_) {
        if (other.dtype == bucket.dtype && other.unit < 0 && bucket.unit < 0) numel = std::max(numel, other.numel);
      }
    }
    bucket.lent = data_.allocate(numel, at::TensorOptions().dtype(bucket.dtype).device(device));
  }
  bucket.incoming = bucket.lent.narrow(0, 0, bucket.numel);
}

// Launched buckets end here while the backward goes on, so that their whole gradients are given back at once.
void Reducer::keep_few_in_flight() {
  const auto messages = [this] {
    size_t count = 0;
    const Pending* last = nullptr;
    for (const Bucket* bucket : in_flight_) {
      if (bucket->reduction.get() != last) ++count;
      last = bucket->reduction.get();
    }
    return count;
  };
  while (messages() >= kInFlight) {
    Bucket& oldest = *in_flight_.front();
    finish(oldest, here(Where::Kind::backward, "the reduction of bucket " + std::to_string(oldest.index)));
  }
}

void Reducer::take(Sink& sink, const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[sink.slot.bucket];
  ledger_.delivered(sink.index);
  open_incoming(bucket);
  const at::Tensor place = view_in(bucket.incoming, sink.slot.offset, sink.parameter);
  sink.take(gradient, place, sink.raw ? 1.0 : incoming_scale());
  bucket.lanes.end_part(bucket.device());
  ledger_.settled(sink.index);
}

// Everything that belongs into `incoming` and is not there yet: gradients that lie elsewhere, and zeros.
void Reducer::complete_incoming(Bucket& bucket) {
  at::NoGradGuard no_grad;
  const double scale = incoming_scale();
  open_incoming(bucket);
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    Sink& sink = *bucket.sinks[i];
    const at::Tensor place = view_in(bucket.incoming, sink.slot.offset, sink.parameter);
    for (; sink.unsettled > 0; --sink.unsettled) ledger_.settled(sink.index);
    try {
      sink.hand_over(place, sink.raw ? 1.0 : scale);
      if (sink.raw && scale != 1.0) place.mul_(scale);
      sink.raw = false;
    } catch (...) {
      // The others wait for this reduction all the same; the failure is told when the pass closes.
      if (!failure_) failure_ = std::current_exception();
    }
    int64_t end = sink.slot.offset;
    if (sink.taken > 0) end += sink.parameter.numel();
    if (end < bucket.after(i)) bucket.incoming.narrow(0, end, bucket.after(i) - end).zero_();
    sink.taken = 0;
  }
}

void Reducer::reduce_incoming(Bucket& bucket) {
  at::NoGradGuard no_grad;
  // The first one overwrites all of it.
  make_gradient(bucket, bucket.has_gradient() ? Blank::yes : Blank::no);
  if (deterministic_ && !bucket.shares.empty()) {
    bucket.incoming = bucket.shares.front();
    bucket.shares.clear();
    for (Sink* sink : bucket.sinks) sink->taken = 1;  // the sums hold something, zeros at least, for all of them
  }
  complete_incoming(bucket);
  ledger_.reduced(bucket.index);
  const bool fresh = !bucket.has_gradient();
  if (!fresh) {
    // What no gradient stands for is old.
    for (Sink* sink : bucket.sinks) {
      if (!sink->grad().defined()) sink->view.zero_();
    }
    bucket.arriving = at::empty_like(bucket.gradient);
  }
  if (deterministic_) return reduce_tree(bucket, bucket.target());
  if (bucket.alone) return send({&bucket});
  outgoing_.push_back(&bucket);
}

void Reducer::finish(Bucket& bucket, const Where& where) {
  if (!bucket.under_way) return;
  at::NoGradGuard no_grad;
  // In the order in which they began, whoever is wanted: over two axes, the end of a reduction is a collective.
  while (!in_flight_.empty() && in_flight_.front() != &bucket) finish(*in_flight_.front(), where);
  if (!in_flight_.empty()) in_flight_.pop_front();
  bucket.under_way = false;
  const Alone alone(bucket.lanes, bucket.device());
  if (bucket.reduction) bucket.reduction->wait(where);
  bucket.reduction.reset();
  if (!eats()) return;
  if (!deterministic_) groups_.replicate.all_reduce(bucket.target()).wait(where);
  if (bucket.arriving.defined()) bucket.gradient.add_(bucket.arriving);
  // They were made under the lanes of the backward and die under this one, which has waited for all of them.
  keep_for_current(bucket.arriving);
  keep_for_current(bucket.incoming);
  bucket.arriving.reset();
  bucket.incoming.reset();
  // Fresh memory costs a fault per page: the next bucket of this step takes this one's.
  const bool reusable = bucket.device().is_cpu() && !deterministic_ && spares_.size() < kInFlight;
  if (bucket.lent.defined() && reusable) spares_.push_back(bucket.lent);
  bucket.lent.reset();
}

// The ranks' sums, added as the upper part of the tree that the shares of each rank began.
void Reducer::reduce_tree(Bucket& bucket, const at::Tensor& target) {
  const Where where = here(Where::Kind::step, "the reduction of bucket " + std::to_string(bucket.index));
  auto sum_over = [&](Group& group, const at::Tensor& whole) {
    if (group.size() == 1) return whole;
    const at::Tensor parts = group.all_to_all(whole, where);
    const std::vector<at::Tensor> rows = parts.chunk(group.size());
    sum_tree(rows, 0, rows.size());
    return rows[0];
  };
  at::Tensor part = sum_over(groups_.shard, bucket.incoming);
  if (groups_.replicate.size() > 1) {
    const at::Tensor piece = sum_over(groups_.replicate, part.contiguous());
    part = at::empty_like(part);
    groups_.replicate.all_gather(part, piece.contiguous()).wait(where);
  }
  part = part * (1.0 / data_.size());
  if (target.numel() == part.numel()) {
    target.copy_(part);
  } else {
    groups_.shard.all_gather(target, part).wait(where);
  }
}

// ---- shares of a deterministic step

// Before a share: gradients the user dropped since the last one are dropped from the sums too.
void Reducer::prepare_share() {
  at::NoGradGuard no_grad;
  if (passes_ == 1) return;
  for (Sink& sink : sinks_) {
    Bucket& bucket = buckets_[sink.slot.bucket];
    if (!sink.grad().defined()) {
      const Alone alone(bucket.lanes, bucket.device());
      for (at::Tensor& sum : bucket.shares) view_in(sum, sink.slot.offset, sink.parameter).zero_();
    } else if (sink.grad_in_bucket() && sink.view._version() != sink.version) {
      throw Error(world_.rank(), "the gradient of parameter '" + sink.name +
                                     "' was changed in place between two backwards of one deterministic step; change "
                                     "gradients after the last backward, or clear them with zero_grad()");
    }
  }
}

// After a share: it joins the sums of the shares before it, wherever the tree says so.
void Reducer::push_shares() {
  at::NoGradGuard no_grad;
  const int64_t count = shares_per_step();
  if (passes_ > count) return;  // step() says so
  for (Bucket& bucket : buckets_) {
    const Alone alone(bucket.lanes, bucket.device());
    make_gradient(bucket);
    for (Sink* sink : bucket.sinks) {
      const bool given = sink->given || (sink->grad().defined() && !sink->grad_in_bucket());
      if (!sink->grad().defined() && given) sink->view.zero_();
      sink->given = given;
    }
    complete_incoming(bucket);
    for (Sink* sink : bucket.sinks) {
      if (!sink->grad().defined() && sink->given) sink->grad() = sink->view;
      sink->given = false;
      sink->version = sink->view._version();
    }
    bucket.shares.push_back(bucket.incoming);
    bucket.incoming.reset();
    bucket.lent.reset();
    for (int sums = sums_after(passes_ - 1, 0, count); sums > 0; --sums) {
      bucket.shares[bucket.shares.size() - 2].add_(bucket.shares.back());
      keep_for_current(bucket.shares.back());
      bucket.shares.pop_back();
    }
  }
}

void Reducer::check_shares() const {
  const int64_t count = shares_per_step();
  if (passes_ == 0 || passes_ == count) return;
  throw Error(world_.rank(), "step() after " + std::to_string(passes_) + " backwards in deterministic mode; expected " +
                                 std::to_string(count) + ", one for each of this rank's shares (virtual_ranks " +
                                 std::to_string(options_.virtual_ranks) + " over " + std::to_string(data_.size()) +
                                 " ranks)");
}

at::Tensor Reducer::full_gradient(const at::Tensor& parameter) {
  std::lock_guard lock(mutex_);
  check_alive();
  const Sink* sink = sink_of(parameter);
  if (sink == nullptr) return {};
  if (held_ && data_.size() > 1) {
    throw Error(world_.rank(), "full_gradient of '" + sink->name +
                                   "' while gradients of no_sync backwards wait for their reduction; run a backward "
                                   "outside no_sync first");
  }
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[sink->slot.bucket];
  const Alone alone(bucket.lanes, bucket.device());
  if (!shards_gradient_) return sink->grad().defined() ? sink->grad().detach().clone() : at::Tensor();
  make_gradient(bucket);
  const bool piece = sink->grad().defined() && !sink->grad_in_bucket() && sink->grad_is_piece();
  at::Tensor mine = bucket.gradient;
  if (piece && sink->grad().sizes() == sink->view.sizes()) {
    mine = mine.clone();
    mine.narrow(0, sink->view.storage_offset() - bucket.gradient.storage_offset(), sink->view.numel())
        .copy_(sink->grad().reshape(-1));
  }
  const at::Tensor whole = data_.allocate(bucket.numel, bucket.gradient.options());
  groups_.shard.all_gather(whole, mine).wait(here(Where::Kind::step, "full_gradient of '" + sink->name + "'"));
  if (!sink->grad().defined()) return {};
  if (!sink->grad_in_bucket() && !sink->grad_is_piece()) return sink->grad().detach().clone();
  return view_in(whole, sink->slot.offset, parameter).clone();
}

Sink* Reducer::sink_of(const at::Tensor& parameter) {
  const auto it = candidate_of_.find(parameter.unsafeGetTensorImpl());
  if (it == candidate_of_.end()) throw Error(world_.rank(), "a tensor that is no parameter of this engine");
  const int sink = sink_of_[it->second];
  return sink < 0 ? nullptr : &sinks_[sink];
}

}  // namespace plumb

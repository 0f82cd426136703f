#include "grad/tree.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "backend/round.h"

namespace plumb {
namespace {

// The sum of rows [begin, end) as a binary tree: halves first, then their sum. In place, in row `begin`.
void sum_tree(const std::vector<at::Tensor>& rows, size_t begin, size_t end) {
  if (end - begin < 2) return;
  const size_t middle = begin + (end - begin) / 2;
  sum_tree(rows, begin, middle);
  sum_tree(rows, middle, end);
  rows[begin].add_(rows[middle]);
}

// How many sums of the tree over the leaves [begin, end) are complete once leaf `leaf` is there.
int sums_after(int64_t leaf, int64_t begin, int64_t end) {
  if (end - begin < 2) return 0;
  const int64_t middle = begin + (end - begin) / 2;
  const int inside = leaf < middle ? sums_after(leaf, begin, middle) : sums_after(leaf, middle, end);
  return inside + (leaf == end - 1 ? 1 : 0);
}

// In place, or as a piece that was computed of the one that is shown.
bool was_changed(const Sink& sink) { return sink.changed_in_place() || sink.piece_elsewhere(); }

}  // namespace

at::Tensor Tree::memory_for(const Bucket& bucket) {
  const Alone alone(const_cast<Bucket&>(bucket).lanes,
                    bucket.device());  // memory is first the lane's that asked for it
  return team_.data().allocate(bucket.numel, at::TensorOptions().dtype(bucket.dtype).device(bucket.device()));
}

// Gradients the user dropped or replaced since the last share are dropped from the sums too. One that replaces them is part of
// the next share.
void Tree::open_pass(const OpenPass&, int64_t number, std::deque<Sink>& sinks) {
  at::NoGradGuard no_grad;
  follow_rules();
  for (Sink& sink : sinks) {
    if (number == 1) {
      take_in(sink);
      continue;
    }
    check_unchanged(sink);
    if (!sink.grad_in_bucket()) forget_shares(sink);
  }
}

// A rule that asks for a wider dtype than that of the shares before does so for their sum.
void Tree::follow_rules() {
  for (Bucket& bucket : buckets_) {
    for (at::Tensor& share : bucket.incoming.shares) {
      const at::ScalarType dtype = c10::promoteTypes(share.scalar_type(), bucket.dtype);
      if (dtype == share.scalar_type()) continue;
      const Alone alone(bucket.lanes, bucket.device());
      const at::Tensor wide = team_.data().allocate(bucket.numel, share.options().dtype(dtype));
      wide.copy_(share);
      keep_for_current(share);
      share = wide;
    }
  }
}

void Tree::check_unchanged(const Sink& sink) const {
  if (!was_changed(sink)) return;
  throw Error(team_.rank(), "the gradient of parameter '" + sink.name +
                                "' was changed in place between two backwards of one deterministic step, whose "
                                "shares are summed at step(); scale the loss, or clear gradients with zero_grad()");
}

void Tree::take_in(Sink& sink) {
  if (!buckets_.of(sink).incoming.shares.empty()) check_unchanged(sink);
  Collected::take_in(sink);
}

void Tree::forget_shares(const Sink& sink) {
  Bucket& bucket = buckets_.of(sink);
  const Alone alone(bucket.lanes, bucket.device());
  for (at::Tensor& sum : bucket.incoming.shares) view_in(sum, sink.slot.offset, sink).zero_();
  if (!bucket.incoming.before.defined()) return;
  bucket.incoming.before.narrow(0, sink.view.storage_offset() - bucket.gradient.storage_offset(), sink.view.numel())
      .zero_();
}

void Tree::forget() {
  Collected::forget();
  for (Bucket& bucket : buckets_) {
    const Alone alone(bucket.lanes, bucket.device());
    for (const at::Tensor& share : bucket.incoming.shares) keep_for_current(share);
    keep_for_current(bucket.incoming.before);
    bucket.incoming.shares.clear();
    bucket.incoming.before.reset();
  }
}

// Until step(), .grad is what this rank has so far, as under no_sync: its own shares, on top of what it kept.
void Tree::show(Bucket& bucket) {
  const Incoming& incoming = bucket.incoming;
  incoming.before.defined() ? bucket.gradient.copy_(incoming.before) : bucket.gradient.zero_();
  for (const at::Tensor& share : incoming.shares)
    bucket.gradient.add_(share.narrow(0, bucket.kept.begin, bucket.kept.size()));
}

// The share joins the sums of those before it, wherever the tree says so.
void Tree::close_held_pass(int64_t pass) {
  at::NoGradGuard no_grad;
  const int64_t count = shares_per_step();
  if (pass > count) return;  // step() says so
  const auto join = [&](std::vector<at::Tensor>& shares, const at::Tensor& share, int64_t which) {
    shares.push_back(share);
    for (int sums = sums_after(which - 1, 0, count); sums > 0; --sums) {
      shares[shares.size() - 2].add_(shares.back());
      keep_for_current(shares.back());
      shares.pop_back();
    }
  };
  for (Bucket& bucket : buckets_) {
    if (bucket.frozen && !bucket.wanted()) continue;
    const Alone alone(bucket.lanes, bucket.device());
    buckets_.make_gradient(bucket);
    for (Sink* sink : bucket.sinks) {
      if (sink->grad_in_bucket()) continue;
      sink->contributed = sink->contributed || sink->grad().defined();
      sink->view.zero_();  // what no gradient stands for is old
    }
    if (bucket.incoming.shares.empty() && std::ranges::any_of(bucket.sinks, &Sink::grad_in_bucket))
      bucket.incoming.before = bucket.gradient.clone();
    complete_incoming(bucket);
    for (Sink* sink : bucket.sinks) {
      if (!sink->grad().defined() && sink->contributed) sink->grad() = sink->shown;
      sink->contributed = false;
    }
    std::vector<at::Tensor>& shares = bucket.incoming.shares;
    // Shares that a frozen bucket had no part in were zeros, as those are that went with cleared gradients when a load laid the
    // buckets out anew.
    const int64_t missing = shares.empty() ? pass - 1 : 0;
    for (int64_t which = 1; which <= missing; ++which) join(shares, at::zeros_like(bucket.incoming.sum), which);
    join(shares, bucket.incoming.sum, pass);
    bucket.incoming.sum.reset();
    bucket.incoming.memory.reset();
    show(bucket);
  }
}

// What it collected has joined no sum yet.
bool Tree::drop_held_pass() {
  for (Bucket& bucket : buckets_) {
    const Alone alone(bucket.lanes, bucket.device());
    keep_for_current(bucket.incoming.sum);
    bucket.incoming.sum.reset();
    bucket.incoming.memory.reset();
    for (Sink* sink : bucket.sinks) {
      sink->forget_contributions();
      sink->unscaled = false;
    }
  }
  return true;
}

void Tree::check_step(int64_t passes, const std::deque<Sink>& sinks) const {
  Collected::check_step(passes, sinks);
  for (const Sink& sink : sinks) {
    if (passes == 0 || !was_changed(sink)) continue;
    throw Error(team_.rank(),
                "the gradient of parameter '" + sink.name +
                    "' was changed in place before step() in deterministic mode, which sums the shares only "
                    "there, so that the change would be lost; scale the loss, use Options::clip_norm, or "
                    "clear the gradient");
  }
}

void Tree::check_passes(int64_t passes) const {
  const int64_t count = shares_per_step();
  if (passes == 0 || passes == count) return;
  throw Error(team_.rank(), "step() after " + std::to_string(passes) + " backwards in deterministic mode; expected " +
                                std::to_string(count) + ", one for each of this rank's shares (virtual_ranks " +
                                std::to_string(virtual_ranks_) + " over " + std::to_string(team_.size()) + " ranks)");
}

void Tree::begin(Bucket& bucket, const Where& where) {
  buckets_.make_gradient(bucket, bucket.has_gradient() ? Buckets::Blank::yes : Buckets::Blank::no);
  if (!bucket.incoming.shares.empty()) {
    for (const Sink* sink : bucket.sinks) {
      if (!sink->grad_in_bucket()) forget_shares(*sink);  // cleared or replaced since the last share
    }
    bucket.incoming.sum = bucket.incoming.shares.front();
    bucket.incoming.shares.clear();
    for (Sink* sink : bucket.sinks) sink->collected = 1;  // the sums hold something, zeros at least, for all of them
    bucket.incoming.before.defined() ? bucket.gradient.copy_(bucket.incoming.before) : bucket.gradient.zero_();
    bucket.incoming.before.reset();
  }
  complete_incoming(bucket);
  ledger_.reduced(bucket.index);
  open_target(bucket);
  look_at(bucket.incoming.sum, where.pass);
  Where detailed = where;
  detailed.detail = "the reduction of bucket " + std::to_string(bucket.index);
  reduce(bucket, detailed);
}

// The ranks' sums, added as the upper part of the tree that the shares of each rank began.
void Tree::reduce(Bucket& bucket, const Where& where) {
  auto sum_over = [&](Group& group, const at::Tensor& whole) {
    if (group.size() == 1) return whole;
    const at::Tensor parts = group.all_to_all(whole, where);
    const std::vector<at::Tensor> rows = parts.chunk(group.size());
    sum_tree(rows, 0, rows.size());
    return rows[0];
  };
  at::Tensor part = sum_over(team_.shard(), bucket.incoming.sum);
  if (team_.replicate().size() > 1) {
    // Whole rows need not share evenly among the replicas.
    const int64_t numel = part.numel(), padding = round_up(numel, team_.replicate().size()) - numel;
    part = padding > 0 ? at::constant_pad_nd(part, {0, padding}) : part.contiguous();
    const at::Tensor piece = sum_over(team_.replicate(), part);
    part = at::empty_like(part);
    team_.replicate().all_gather(part, piece.contiguous()).wait(where);
    part = part.narrow(0, 0, numel);
  }
  part = part * (1.0 / team_.size());
  const at::Tensor& target = bucket.target();
  if (target.numel() == part.numel()) {
    target.copy_(part);
  } else {
    // Of shares that came under a wider rule than the last one's it is wider than where it goes.
    team_.shard().all_gather(target, part.to(target.scalar_type())).wait(where);
  }
}

void Tree::arrived(Bucket& bucket, const Where&) {
  close_target(bucket);
  bucket.incoming.memory.reset();
}

}  // namespace plumb

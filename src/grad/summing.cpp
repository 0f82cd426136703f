#include "grad/summing.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>

#include "grad/in_place.h"
#include "grad/scattered.h"
#include "grad/tree.h"
#include "watch/timeline.h"

namespace plumb {

void Summing::finish(Bucket& bucket, const Where& where) {
  if (!bucket.under_way) return;
  at::NoGradGuard no_grad;
  finish_before(bucket, where);
  bucket.under_way = false;
  const Alone alone(bucket.lanes, bucket.device());
  if (bucket.reduction) bucket.reduction->wait(where);
  bucket.reduction.reset();
  arrived(bucket, where);
  if (Timeline& timeline = timeline_of(team_.world()); timeline.on()) {
    timeline.span(tracks::buckets, "bucket " + std::to_string(bucket.index), bucket.begun);
  }
}

// A sum takes one read and no memory, and is finite only where every summand is.
void Summing::look_at(const at::Tensor& own, int64_t pass) {
  if (!looks_ || own.is_complex()) return;
  sent_.push_back({pass, own.sum(own.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)});
}

std::optional<int64_t> Summing::first_not_finite() const {
  std::optional<int64_t> first;
  for (const Sent& one : sent_) {
    if ((!first || one.pass < *first) && !at::isfinite(one.sum).item<bool>()) first = one.pass;
  }
  return first;
}

void Summing::forget_cleared(const std::deque<Sink>& sinks) {
  if (!sent_.empty() && std::ranges::none_of(sinks, [](const Sink& sink) { return sink.grad().defined(); })) {
    sent_.clear();
  }
}

void Summing::use_hook(std::unique_ptr<c10d::CommHookInterface> /*hook*/) {
  throw Error(team_.rank(), "a communication hook makes the mean of whole gradients; use strategy 'ddp' or 'zero1'");
}

void Summing::divide_by(int /*ranks*/) {
  throw Error(team_.rank(),
              "gradients are divided by fewer than all ranks only where they are whole; use strategy 'ddp'");
}

namespace {

std::unique_ptr<Summing> policy_of(Team& team, Buckets& buckets, Ledger& ledger, const Options& options) {
  if (options.deterministic) return std::make_unique<Tree>(team, buckets, ledger, options.virtual_ranks);
  if (team.shards_gradient()) {
    const auto holding = options.hold_unsharded ? Scattered::Holding::whole : Scattered::Holding::never;
    return std::make_unique<Scattered>(team, buckets, ledger, holding);
  }
  return std::make_unique<InPlace>(team, buckets, ledger);
}

}  // namespace

std::unique_ptr<Summing> make_summing(Team& team, Buckets& buckets, Ledger& ledger, const Options& options) {
  auto summing = policy_of(team, buckets, ledger, options);
  if (options.nonfinite == NonFinite::error && team.size() > 1) summing->look_for_nonfinite();
  return summing;
}

}  // namespace plumb

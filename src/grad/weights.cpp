#include "grad/weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "grad/piece.h"
#include "plumb/error.h"

namespace plumb {

namespace {

bool any_defined(const std::deque<Sink>& sinks) {
  return std::ranges::any_of(sinks, [](const Sink& sink) { return sink.grad().defined(); });
}

bool any_piece(const std::deque<Sink>& sinks) {
  return std::ranges::any_of(sinks, [](const Sink& sink) { return sink.grad().defined() && sink.grad_is_piece(); });
}

}  // namespace

// Small ones first: one is enough, and mostly it is among them.
bool Weights::holds(const std::deque<Sink>& sinks) const {
  constexpr int64_t small_numel = 1 << 12;
  const auto holds = [&](const Sink& sink) {
    if (!sink.grad().defined()) return false;
    const at::Tensor& gradient = sink.grad_in_bucket() ? sink.view : sink.grad();
    return zeroed_ == Zeroed::is_kept || unmarked(gradient).detach().ne(0).any().item<bool>();
  };
  const auto is_small = [](const Sink& sink) { return sink.parameter.numel() <= small_numel; };
  return std::ranges::any_of(sinks, [&](const Sink& sink) { return is_small(sink) && holds(sink); }) ||
         std::ranges::any_of(sinks, [&](const Sink& sink) { return !is_small(sink) && holds(sink); });
}

void Weights::check(int rank, double weight) {
  if (!(weight >= 0) || !std::isfinite(weight)) {
    throw Error(rank, c10::str("a backward of weight ", weight,
                               "; a weight is how many things the loss sums over, and not negative"));
  }
}

void Weights::begin_pass() {
  ++count_;
  before_ = sum_;
}

void Weights::join(const std::deque<Sink>& sinks, OpenPass::Sync sync) {
  const bool there = holds(sinks);
  if (!counts_ && there) {
    throw Error(
        rank_,
        "a backward with a weight adds to gradients that are no sum of weighted losses (of the last step, or set "
        "by hand); clear them with zero_grad() first");
  }
  // They were cleared, and what they weighed with them.
  if (known_ && !any_defined(sinks)) {
    sum_ = before_ = 0;
  } else if (sync == OpenPass::Sync::reduced && zeroed_ == Zeroed::is_cleared && any_piece(sinks)) {
    asks_ = true;
    there_ = there;
  } else if (held_ && !there) {
    sum_ = before_ = 0;
  }
}

void Weights::ask(Facts& mine) const {
  mine.held = asks_ && held_;
  mine.there = asks_ && there_;
}

void Weights::hear(const Agreement& all) {
  if (!std::exchange(asks_, false) || !all.any.held || all.any.there) return;
  sum_ -= before_;
  before_ = 0;
}

void Weights::weigh(double weight) {
  check(rank_, weight);
  sum_ += weight;
}

void Weights::end_pass(const std::deque<Sink>& sinks) {
  counts_ = true;
  held_ = holds(sinks);
  known_ = any_defined(sinks);
}

void Weights::add(const Agreement& all) {
  if (all.any.weighted == 0) return;
  const std::vector<Facts> alike = {all.any};
  const std::vector<Facts>& said = all.everybody.empty() ? alike : all.everybody;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank].weighted == said[rank].pass) continue;
    throw Error(rank_, c10::str("rank ", rank, " gave a weight to ", said[rank].weighted, " of its ", said[rank].pass,
                                " backwards of this step (those of one engine.pass() are one); every backward of a "
                                "step has one, on every rank, or none has (a rank with nothing to contribute has "
                                "weight 0)"));
  }
  if (all.weight == 0) throw Error(rank_, "the weights of all backwards of this step are 0: there is no mean to take");
  factor_ = static_cast<double>(all.ranks) / all.weight;
}

double Weights::take_factor() {
  const double factor = factor_;
  forget();
  return factor;
}

}  // namespace plumb

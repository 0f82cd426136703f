#include "grad/weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "grad/piece.h"
#include "plumb/error.h"

namespace plumb {

namespace {

constexpr int64_t kNoneIsLeft = -1;  // what any rank says of its sums is what all of them hear: every bit is set

bool any_defined(const std::deque<Sink>& sinks) {
  return std::ranges::any_of(sinks, [](const Sink& sink) { return sink.grad().defined(); });
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

Weights::OfPass& Weights::at(int64_t pass) {
  const auto index = static_cast<size_t>(pass);
  if (passes_.size() <= index) passes_.resize(index + 1);
  return passes_[index];
}

void Weights::drop_before(int64_t pass, Saw why) {
  at(pass).saw = why;
  from_ = pass;
  told_ = false;
}

void Weights::begin_pass(int64_t pass) {
  ++count_;
  at(pass);
}

void Weights::look(const std::deque<Sink>& sinks, int64_t pass) {
  there_ = holds(sinks);
  // They were cleared, and what they weighed with them.
  if (std::exchange(cleared_, false) || (known_ && !any_defined(sinks))) {
    drop_before(pass, Saw::nothing);
  } else if (there_) {
    at(pass).saw = Saw::numbers;
  } else if (held_) {
    drop_before(pass, Saw::zeros);
  }
}

void Weights::join(const std::deque<Sink>& sinks) {
  look(sinks, static_cast<int64_t>(passes_.size()) - 1);
  if (!counts_ && there_) {
    throw Error(
        rank_,
        "a backward with a weight adds to gradients that are no sum of weighted losses (of the last step, or set "
        "by hand); clear them with zero_grad() first");
  }
}

void Weights::cleared(std::optional<int64_t> open_pass) {
  if (count_ == 0) return forget();
  counts_ = false;
  if (open_pass) {
    drop_before(*open_pass, Saw::nothing);
  } else {
    cleared_ = true;
  }
}

void Weights::weigh(double weight) {
  check(rank_, weight);
  passes_.back().weight += weight;
}

void Weights::end_pass(const std::deque<Sink>& sinks) {
  counts_ = true;
  held_ = holds(sinks);
  known_ = any_defined(sinks);
}

double Weights::sum() const {
  double sum = 0;
  for (size_t pass = static_cast<size_t>(from_); pass < passes_.size(); ++pass) sum += passes_[pass].weight;
  return sum;
}

void Weights::tell(Facts& mine) const {
  mine.weight = cleared_ ? 0 : sum();
  mine.weighted = count_;
  mine.since = cleared_ ? kNoneIsLeft : told_ ? 0 : from_;
}

// Where they saw something else, everybody hears what everybody saw and weighed. Gradients were cleared where a rank saw that and none
// saw numbers; one whose own have all gone knows for itself.
void Weights::hear(Group& control, Agreement& all, const Where& where) {
  told_ = true;
  if (all.any.since == kNoneIsLeft) {
    cleared_ = true;
    all.weight = 0;
    return;
  }
  if (all.any.since == all.every.since) return;
  std::vector<int64_t> mine;
  for (int64_t pass = 0; pass <= all.any.pass; ++pass) {
    mine.push_back(static_cast<int64_t>(at(pass).saw));
    mine.push_back(std::bit_cast<int64_t>(at(pass).weight));
  }
  const auto everybodys = control.exchange(mine, where);
  const auto saw = [](const std::vector<int64_t>& one, int64_t pass) { return static_cast<Saw>(one[2 * pass]); };
  const auto from = [&](const std::vector<int64_t>& one) {
    for (int64_t pass = all.any.pass; pass > 0; --pass) {
      const auto some = [&](auto... kinds) {
        return std::ranges::any_of(everybodys,
                                   [&](const auto& theirs) { return ((saw(theirs, pass) == kinds) || ...); });
      };
      if (saw(one, pass) == Saw::nothing || (some(Saw::zeros, Saw::nothing) && !some(Saw::numbers))) return pass;
    }
    return int64_t{0};
  };
  all.weight = 0;
  for (const auto& one : everybodys) {
    for (int64_t pass = from(one); pass <= all.any.pass; ++pass) all.weight += std::bit_cast<double>(one[2 * pass + 1]);
  }
  from_ = from(mine);
}

void Weights::add(const Agreement& all) {
  factor_ = 1;
  if (all.any.since == kNoneIsLeft || (all.any.weighted == 0 && all.weight == 0)) return;
  if (all.any.weighted == 0 && all.any.pass > 0) {
    throw Error(rank_,
                "backwards without a weight added to sums of weighted losses that a skipped step left; clear them with "
                "zero_grad() first");
  }
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

void Weights::end_step() {
  if (cleared_) return forget();
  if (passes_.empty()) return;
  passes_ = {{sum()}};
  from_ = count_ = 0;
  told_ = true;
  factor_ = 1;
}

}  // namespace plumb

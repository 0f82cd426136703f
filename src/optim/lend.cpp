// What an optimizer of the user's own updates, and what follows his update.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "optim/update.h"

namespace plumb {

std::vector<Piece> Updater::lend(std::deque<Bucket>& buckets) {
  at::NoGradGuard no_grad;
  std::vector<Piece> pieces;
  for (Bucket& bucket : buckets) {
    if (!bucket.has_gradient()) continue;
    flats_of(bucket);
    for (const Sink* sink : bucket.sinks) {
      const at::Tensor& weight = states_[sink->index].weight;
      const Range mine = overlap(sink->slot, sink->parameter.numel(), bucket.updated);
      at::Tensor gradient;
      if (sink->grad().defined()) {
        states_[sink->index].lent = true;
        const int64_t begin = std::clamp<int64_t>(mine.begin - bucket.kept.begin, 0, bucket.kept.size());
        gradient = bucket.gradient.narrow(0, begin, mine.size()).to(weight.scalar_type());
      }
      pieces.push_back({sink->parameter, mine.begin - sink->slot.offset, weight, gradient});
    }
  }
  return pieces;
}

const Stretches& Updater::lend_flat(std::deque<Bucket>& buckets) {
  at::NoGradGuard no_grad;
  std::vector<Stretch> now;
  for (Bucket& bucket : buckets) {
    if (!bucket.has_gradient()) continue;
    const Flats& flats = flats_of(bucket);
    struct Open {
      Range range;
      std::vector<std::pair<const Sink*, Range>> members;
    };
    std::vector<Open> open;
    bool joins = false;  // the last one goes on
    for (size_t i = 0; i < bucket.sinks.size(); ++i) {
      const Sink* sink = bucket.sinks[i];
      const Range mine = overlap(sink->slot, sink->parameter.numel(), bucket.updated);
      if (!sink->grad().defined()) {
        joins = joins && mine.size() == 0;
        continue;
      }
      states_[sink->index].lent = true;
      const Range padded{mine.begin, mine.size() > 0 ? std::min(bucket.after(i), bucket.updated.end) : mine.end};
      if (mine.size() == 0) {
        if (open.empty()) open.emplace_back();
      } else if (joins || (!open.empty() && open.back().range.size() == 0)) {
        if (open.back().range.size() == 0) open.back().range.begin = padded.begin;
        open.back().range.end = padded.end;
      } else {
        open.push_back({padded, {}});
      }
      joins = joins || mine.size() > 0;
      open.back().members.emplace_back(sink, mine);
    }
    for (const Open& one : open) {
      const auto of = [&](const at::Tensor& flat, const Range& covers) {
        return flat.narrow(0, std::clamp<int64_t>(one.range.begin - covers.begin, 0, flat.numel()), one.range.size());
      };
      Stretch& stretch = now.emplace_back();
      stretch.weight = of(flats.weight, bucket.updated);
      stretch.gradient = of(bucket.gradient, bucket.kept).to(stretch.weight.scalar_type());
      for (const auto& [sink, mine] : one.members) {
        stretch.members.push_back({sink->parameter, mine.begin - sink->slot.offset,
                                   mine.size() > 0 ? mine.begin - one.range.begin : 0, mine.size()});
      }
    }
  }
  return stretches_.renew(std::move(now));
}

void Updater::take_back(std::deque<Bucket>& buckets, Group& shard, Ledger& ledger, const Where& where) {
  at::NoGradGuard no_grad;
  std::deque<Pending> gathers;
  stretches_.drop_gradients();
  for (Bucket& bucket : buckets) {
    const auto is_lent = [this](const Sink* sink) {  // a step without any gradient may find no states yet
      return static_cast<size_t>(sink->index) < states_.size() && states_[sink->index].lent;
    };
    if (!bucket.has_gradient() && std::none_of(bucket.sinks.begin(), bucket.sinks.end(), is_lent)) continue;
    const Flats& flats = flats_of(bucket);
    if (flats.master) {
      bucket.parameter.narrow(0, bucket.updated.begin - bucket.held.begin, bucket.updated.size()).copy_(flats.weight);
    }
    spread(bucket, shard, gathers, where);
    for (Sink* sink : bucket.sinks) {
      if (!std::exchange(states_[sink->index].lent, false) && !sink->grad().defined()) continue;
      ledger.consumed(sink->index);
      updated(*sink);
    }
  }
  for (Pending& gather : gathers) gather.wait(where);
}

}  // namespace plumb

// Which sink lies where: the layout of the buckets, and the rebuild in ready order.
#include "grad/buckets.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

namespace plumb {
namespace {

// Elements of a parameter that the first of `shards` ranks gets, in whole rows; later ones get as many, fewer, or none. Rows
// are what lies one behind the other in memory: of the dimension with the longest stride, mostly the first.
int64_t rows_of(const at::Tensor& parameter, int64_t shards) {
  std::pair<int64_t, int64_t> outermost{0, 1};
  for (int64_t dim = 0; dim < parameter.dim(); ++dim) {
    outermost = std::max(outermost, std::pair(parameter.stride(dim), parameter.size(dim)));
  }
  const int64_t rows = outermost.second;
  return std::max<int64_t>((rows + shards - 1) / shards * (rows == 0 ? 0 : parameter.numel() / rows), 1);
}

using Kind = std::tuple<int, bool, at::ScalarType, at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

// The layout of these sinks in this order; `indices[i]` is the sink of the layout's item i. Each unit has buckets of its
// own, however large; parameters of no unit lie behind them, in buckets up to the cap. Frozen parameters of a unit lie
// apart from trained ones, which alone need gradients and state. Cut at rows, each has a bucket, whose equal ranges are whole
// rows. `shards`: of the mesh's axis.
Layout plan_sinks(const std::deque<Sink>& sinks, const std::vector<int>& indices, const Options& options, int ranks,
                  int shards) {
  const int owners = options.cut == Cut::at_parameters ? shards : 0;
  std::map<Kind, int> kinds;
  std::vector<Item> items;
  std::vector<int> in_units, others;
  for (int index : indices) {
    const Sink& sink = sinks[index];
    const at::Tensor& parameter = sink.parameter;
    const bool frozen = sink.unit >= 0 && !parameter.requires_grad();
    const c10::Device device = parameter.device();
    const Kind kind{sink.unit, frozen, sink.rule.bucket, parameter.scalar_type(), device.type(), device.index()};
    const int number = kinds.emplace(kind, static_cast<int>(kinds.size())).first->second;
    (sink.unit >= 0 ? in_units : others).push_back(static_cast<int>(items.size()));
    items.push_back({parameter.numel(), static_cast<int64_t>(c10::elementSize(sink.rule.bucket)), number});
    if (options.cut == Cut::at_rows && sink.unit >= 0) items.back().alone = shards * rows_of(parameter, shards);
  }
  constexpr int64_t no_cap = std::numeric_limits<int64_t>::max();
  Layout layout = plan(items, in_units, {no_cap, no_cap, ranks, owners});
  const Layout rest = plan(items, others, {options.bucket_bytes, options.first_bucket_bytes, ranks, owners});
  for (int item : others) {
    layout.slots[item] = rest.slots[item];
    layout.slots[item].bucket += static_cast<int>(layout.buckets.size());
  }
  layout.buckets.insert(layout.buckets.end(), rest.buckets.begin(), rest.buckets.end());
  return layout;
}

}  // namespace

void Buckets::add(std::deque<Sink>& sinks, const std::vector<int>& indices) {
  place(sinks, plan_sinks(sinks, indices, options_, team_.size(), team_.shard().size()), indices);
}

void Buckets::place(std::deque<Sink>& sinks, const Layout& layout, const std::vector<int>& indices) {
  for (const BucketShape& shape : layout.buckets) {
    const int number = static_cast<int>(buckets_.size());
    Bucket& bucket = buckets_.emplace_back();
    bucket.index = number;
    bucket.numel = shape.numel;
    bucket.unit = sinks[indices[shape.items[0]]].unit;
    bucket.frozen = bucket.unit >= 0 && !sinks[indices[shape.items[0]]].parameter.requires_grad();
    bucket.dtype = sinks[indices[shape.items[0]]].rule.bucket;
    for (int item : shape.items) bucket.dtype = c10::promoteTypes(bucket.dtype, sinks[indices[item]].rule.bucket);
    const Range own = owned(shape.numel, team_.shard().rank(), team_.shard().size());
    const Range all{0, shape.numel};
    bucket.kept = team_.shards_gradient() ? own : all;
    bucket.updated = team_.shards(team_.row().state) ? own : all;
    bucket.held = bucket.unit >= 0 ? own : all;
    for (int item : shape.items) {
      Sink& sink = sinks[indices[item]];
      const Slot slot{number, layout.slots[item].offset};
      if (team_.shards_gradient()) {
        sink.slot = slot;
      } else {
        if (!bucket.gradient.defined()) {
          const auto like = at::TensorOptions().dtype(bucket.dtype).device(sink.parameter.device());
          bucket.gradient = team_.data().allocate(shape.numel, like).zero_();
        }
        sink.bind(slot, view_in(bucket.gradient, slot.offset, sink));
      }
      bucket.sinks.push_back(&sink);
    }
    bucket.lanes.end_all(bucket.device());
  }
}

void Buckets::rebuild(std::deque<Sink>& sinks, const std::vector<int>& order, const Where& where) {
  std::deque<Bucket> old = std::move(buckets_);  // alive until every gradient has moved
  buckets_.clear();
  for (Bucket& bucket : old) {
    bucket.lanes.begin_all(bucket.device());
    keep_for_current(bucket.gradient);
  }
  if (team_.shards_gradient()) return reshard(sinks, old, order, where);
  add(sinks, order);
}

// One old bucket at a time is gathered, and everybody takes what is his.
void Buckets::reshard(std::deque<Sink>& sinks, std::deque<Bucket>& old, const std::vector<int>& order,
                      const Where& where) {
  at::NoGradGuard no_grad;
  struct Piece {
    Slot slot;
    bool has = false;
  };
  std::vector<Piece> before;
  for (Sink& sink : sinks) before.push_back({sink.slot, sink.grad_in_bucket()});
  add(sinks, order);
  for (Bucket& bucket : buckets_) make_gradient(bucket);
  for (Bucket& from : old) {
    if (!from.gradient.defined()) continue;
    const at::Tensor whole = team_.data().allocate(from.numel, from.gradient.options());
    team_.shard().all_gather(whole, from.gradient).wait(where);
    for (Sink* sink : from.sinks) {
      if (!before[sink->index].has) continue;
      const Bucket& to = of(*sink);
      const Range mine = overlap(sink->slot, sink->parameter.numel(), to.kept);
      const int64_t begin = before[sink->index].slot.offset + mine.begin - sink->slot.offset;
      sink->view.copy_(whole.narrow(0, begin, mine.size()).view(sink->view.sizes()));
      sink->grad() = sink->shown;
    }
  }
}

void Buckets::for_devices(const std::function<void(c10::Device)>& call) const {
  std::vector<c10::Device> known;
  for (const Bucket& bucket : buckets_) {
    if (std::find(known.begin(), known.end(), bucket.device()) != known.end()) continue;
    known.push_back(bucket.device());
    if (!bucket.device().is_cpu()) call(bucket.device());
  }
}

}  // namespace plumb

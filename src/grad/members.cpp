// Who is in the buckets: the reducer's parameters, their hooks, and the rebuild in ready order.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "grad/reducer.h"
#include "layout/digest.h"

namespace plumb {
namespace {

using Kind = std::tuple<int, bool, at::ScalarType, at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

// The layout of these sinks in this order; `indices[i]` is the sink of the layout's item i. Each unit has buckets of its
// own, however large; parameters of no unit lie behind them, in buckets up to the cap. Frozen parameters of a unit lie
// apart from trained ones, which alone need gradients and state.
Layout plan_sinks(const std::deque<Sink>& sinks, const std::vector<int>& indices, const Options& options, int shards) {
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
  }
  constexpr int64_t no_cap = std::numeric_limits<int64_t>::max();
  Layout layout = plan(items, in_units, {no_cap, no_cap, shards});
  const Layout rest = plan(items, others, {options.bucket_bytes, options.first_bucket_bytes, shards});
  for (int item : others) {
    layout.slots[item] = rest.slots[item];
    layout.slots[item].bucket += static_cast<int>(layout.buckets.size());
  }
  layout.buckets.insert(layout.buckets.end(), rest.buckets.begin(), rest.buckets.end());
  return layout;
}

}  // namespace

Reducer::Reducer(World world, const NamedTensors& parameters, std::vector<int> unit_of, const Options& options)
    : world_(std::move(world)), options_(options), row_(strategy(options.strategy)),
      mesh_(mesh_of(row_, options.mesh, world_.size())), groups_(new_groups(world_, mesh_)), data_(groups_.data),
      control_(groups_.control), ledger_(world_.rank(), options.ledger ? Ledger::Mode::on : Ledger::Mode::off),
      deterministic_(options.deterministic), shards_gradient_(shards(row_.gradient)), candidates_(parameters),
      unit_of_(std::move(unit_of)), sink_of_(parameters.size(), -1), watches_parameters_(world_.size() > 1) {
  for (size_t i = 0; i < candidates_.size(); ++i) candidate_of_[candidates_[i].second.unsafeGetTensorImpl()] = i;
}

Groups& Reducer::gathers() {
  if (!gathers_) gathers_ = std::make_unique<Groups>(new_groups(world_, mesh_));
  return *gathers_;
}

void Reducer::start() {
  backward::install();
  std::vector<int> trainable = newcomers();
  // Gradients come roughly in the reverse order of the model.
  std::reverse(trainable.begin(), trainable.end());
  admit(trainable);
  remember_parameters();
}

std::vector<int> Reducer::newcomers() const {
  std::vector<int> result;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const at::Tensor& parameter = candidates_[i].second;
    const bool wanted = parameter.requires_grad() || parameter.grad().defined() || unit_of_[i] >= 0;
    if (sink_of_[i] < 0 && wanted) result.push_back(static_cast<int>(i));
  }
  return result;
}

int64_t Reducer::newcomers_digest() const {
  const std::vector<int> candidates = newcomers();
  if (candidates.empty()) return 0;
  Digest digest;
  for (int candidate : candidates) digest.add(static_cast<uint64_t>(candidate));
  return digest.value();
}

void Reducer::admit(const std::vector<int>& candidates) {
  std::vector<int> indices;
  for (int candidate : candidates) {
    const auto& [name, parameter] = candidates_[candidate];
    Sink& sink = sinks_.emplace_back();
    sink.index = static_cast<int>(sinks_.size()) - 1;
    sink.name = name;
    sink.parameter = parameter;
    sink.unit = unit_of_[candidate];
    sink.rule = grad_rule(parameter, options_.accumulate_dtype);
    sink_of_[candidate] = sink.index;
    indices.push_back(sink.index);
    hook(sink);
  }
  place(plan_sinks(sinks_, indices, options_, data_.size()), indices);
}

// A frozen parameter has an accumulator only while it can be asked for one.
void Reducer::hook(Sink& sink) {
  if (sink.accumulator || !torch::autograd::isDifferentiableType(sink.parameter.scalar_type())) return;
  const bool frozen = !sink.parameter.requires_grad();
  if (frozen) sink.parameter.set_requires_grad(true);
  listen_to(sink, torch::autograd::impl::grad_accumulator(sink.parameter));
  sink.parameter.register_hook([weak = weak_from_this(), target = &sink](const at::Tensor&) {
    if (auto self = weak.lock()) self->follow_accumulator(*target);
  });
  if (frozen) sink.parameter.set_requires_grad(false);
  offer_fused(sink);
}

// A parameter that was given other memory (torch::load) or another dtype for a while gets a new accumulator, which knows
// nothing of us. Hooks of the parameter itself stay, and run first.
void Reducer::follow_accumulator(Sink& sink) {
  const std::lock_guard lock(mutex_);
  const NodePtr now = torch::autograd::impl::try_get_grad_accumulator(sink.parameter);
  if (!stopped_ && now && now != sink.accumulator) listen_to(sink, now);
}

// Hooks cannot be taken off again, and may outlive this object in a graph the user keeps.
void Reducer::listen_to(Sink& sink, const NodePtr& accumulator) {
  sink.accumulator = accumulator;
  std::weak_ptr<Reducer> weak = weak_from_this();
  Sink* target = &sink;
  sink.accumulator->add_pre_hook(std::make_unique<PreHook>([weak, target](const at::Tensor& gradient) {
    auto self = weak.lock();
    return self ? self->before_accumulation(*target, gradient) : gradient;
  }));
  sink.accumulator->add_post_hook(std::make_unique<PostHook>([weak, target](const at::Tensor& gradient) {
    if (auto self = weak.lock()) self->after_accumulation(*target, gradient);
  }));
}

void Reducer::place(const Layout& layout, const std::vector<int>& indices) {
  for (const BucketShape& shape : layout.buckets) {
    const int number = static_cast<int>(buckets_.size());
    Bucket& bucket = buckets_.emplace_back();
    bucket.index = number;
    bucket.numel = shape.numel;
    bucket.unit = sinks_[indices[shape.items[0]]].unit;
    bucket.dtype = sinks_[indices[shape.items[0]]].rule.bucket;
    for (int item : shape.items) bucket.dtype = c10::promoteTypes(bucket.dtype, sinks_[indices[item]].rule.bucket);
    const Range own = owned(shape.numel, groups_.shard.rank(), groups_.shard.size());
    const Range all{0, shape.numel};
    bucket.kept = shards_gradient_ ? own : all;
    bucket.updated = shards(row_.state) ? own : all;
    bucket.held = bucket.unit >= 0 ? own : all;
    for (int item : shape.items) {
      Sink& sink = sinks_[indices[item]];
      const Slot slot{number, layout.slots[item].offset};
      if (!shards_gradient_ && !bucket.gradient.defined()) {
        bucket.gradient =
            data_.allocate(shape.numel, at::TensorOptions().dtype(bucket.dtype).device(sink.parameter.device()))
                .zero_();
      }
      if (shards_gradient_) {
        sink.slot = slot;
      } else {
        sink.bind(slot, view_in(bucket.gradient, slot.offset, sink.parameter));
      }
      bucket.sinks.push_back(&sink);
    }
    bucket.lanes.end_all(bucket.device());
  }
  form_convoys();
  std::vector<std::string> names;
  std::vector<int> bucket_of;
  for (const Sink& sink : sinks_) {
    names.push_back(sink.name);
    bucket_of.push_back(sink.slot.bucket);
  }
  ledger_.arrange(names, bucket_of, static_cast<int>(buckets_.size()));
}

void Reducer::admit_newcomers(std::vector<Facts>& all, std::vector<bool>& late) {
  if (all[0].newcomers == 0) return;
  admit(newcomers());
  late.resize(buckets_.size(), true);
  all = agree(all[0].kind, late);  // now with the newcomers' gradients
}

// In the order in which gradients became ready on rank 0, counting each parameter when its last one came; parameters
// without a gradient keep their order behind. Happens once: later passes mostly come in the same order.
void Reducer::rebuild() {
  rebuilt_ = true;
  std::vector<int64_t> order;
  std::vector<bool> placed(sinks_.size());
  for (auto it = ready_order_.rbegin(); it != ready_order_.rend(); ++it) {
    if (!placed[*it]) order.push_back(*it);
    placed[*it] = true;
  }
  std::reverse(order.begin(), order.end());
  for (const Bucket& bucket : buckets_) {
    for (const Sink* sink : bucket.sinks) {
      if (!placed[sink->index]) order.push_back(sink->index);
    }
  }
  if (control_.size() > 1) {
    at::Tensor wire = at::tensor(order, at::kLong);
    try {
      control_.broadcast(wire, 0).wait(here(Where::Kind::rebuild, "the order of the buckets"));
    } catch (const std::exception& error) {
      broken_ = error.what();
      throw;
    }
    order.assign(wire.data_ptr<int64_t>(), wire.data_ptr<int64_t>() + wire.numel());
  }
  const std::vector<int> indices(order.begin(), order.end());
  std::deque<Bucket> old = std::move(buckets_);  // alive until every gradient has moved
  buckets_.clear();
  for (Bucket& bucket : old) {
    bucket.lanes.begin_all(bucket.device());
    keep_for_current(bucket.gradient);
  }
  if (shards_gradient_) return reshard(old, indices);
  place(plan_sinks(sinks_, indices, options_, data_.size()), indices);
}

// Pieces move to other ranks: one old bucket at a time is gathered, and everybody takes what is his.
void Reducer::reshard(std::deque<Bucket>& old, const std::vector<int>& indices) {
  at::NoGradGuard no_grad;
  struct Piece {
    Slot slot;
    bool has = false;
  };
  std::vector<Piece> before;
  for (Sink& sink : sinks_) before.push_back({sink.slot, sink.grad_in_bucket()});
  place(plan_sinks(sinks_, indices, options_, data_.size()), indices);
  const Where where = here(Where::Kind::rebuild, "the gradients in their new order");
  for (Bucket& bucket : buckets_) make_gradient(bucket);
  for (Bucket& from : old) {
    if (!from.gradient.defined()) continue;
    const at::Tensor whole = data_.allocate(from.numel, from.gradient.options());
    groups_.shard.all_gather(whole, from.gradient).wait(where);
    for (Sink* sink : from.sinks) {
      if (!before[sink->index].has) continue;
      const Bucket& to = buckets_[sink->slot.bucket];
      const Range mine = overlap(sink->slot, sink->parameter.numel(), to.kept);
      const int64_t begin = before[sink->index].slot.offset + mine.begin - sink->slot.offset;
      sink->view.copy_(whole.narrow(0, begin, mine.size()).view(sink->view.sizes()));
      sink->grad() = sink->view;
    }
  }
}

}  // namespace plumb

#include "optim/update.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "layout/at_a_time.h"

namespace plumb {
namespace {

void check(int rank, bool good, const std::string& what) {
  if (!good) throw Error(rank, what);
}

// A sink's part of a flat tensor that covers `range` of its bucket.
at::Tensor place(const at::Tensor& flat, const Range& range, const Sink& sink) {
  if (!flat.defined()) return {};
  const Range mine = overlap(sink.slot, sink.parameter.numel(), range);
  return flat.narrow(0, std::clamp<int64_t>(mine.begin - range.begin, 0, flat.numel()), mine.size());
}

constexpr int64_t kCastBytes = 16 << 20;  // of gradients and weights in another dtype, for one update

// Whether others wait for what this rank updates of it.
bool travels(const Bucket& bucket) { return bucket.updated.size() != bucket.held.size(); }

// Asked once for each device: that is a call of its driver.
bool any_captured(const std::deque<Bucket>& buckets) {
  std::optional<c10::Device> asked;
  return std::ranges::any_of(buckets, [&](const Bucket& bucket) {
    return bucket.device() != std::exchange(asked, bucket.device()) && capturing(bucket.device());
  });
}

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

}  // namespace

Updater::Updater(int rank, Optimizer optimizer, const Options& options, const NamedTensors& parameters)
    : rank_(rank), optimizer_(std::move(optimizer)), rates_(rank, optimizer_, options, parameters),
      master_weights_(options.master_weights) {}

// Whether the flat tensors of that number are this bucket's: those of one that had it before buckets were made anew are not.
bool Updater::is_home(const Bucket& bucket) const {
  const auto index = static_cast<size_t>(bucket.index);
  return index < flats_.size() && bucket.parameter.defined() && flats_[index].parameter.is_same(bucket.parameter);
}

// Moves the bucket's parameters into flat memory, with whatever state they had before in other buckets.
Updater::Flats& Updater::flats_of(Bucket& bucket) {
  const auto index = static_cast<size_t>(bucket.index);
  if (flats_.size() <= index) flats_.resize(index + 1);
  Flats& flats = flats_[index];
  if (is_home(bucket)) return flats;

  const at::Tensor& like = bucket.sinks[0]->parameter;
  check(rank_, !capturing(like.device()),
        "step() is captured into a graph before the memory of its parameters is laid out, beginning with '" +
            bucket.sinks[0]->name + "'; run a step with the same gradients first, on the same stream");
  check(rank_, !bucket.captured,
        "a backward was captured into a graph before the memory of its parameters was laid out, beginning with '" +
            bucket.sinks[0]->name +
            "': replays would go on with the old values; run a step with the same gradients "
            "before the capture");
  const int64_t length = bucket.updated.size();
  const auto options = at::TensorOptions().device(like.device()).dtype(like.scalar_type());
  const auto state_options = is_half(like.scalar_type()) ? options.dtype(at::kFloat) : options;
  // What lies elsewhere now is read here, and then freed.
  for (const at::Tensor& old : {flats.parameter, flats.weight, flats.momentum, flats.mean, flats.square}) {
    keep_for_current(old);
  }
  flats.master = master_weights_ && is_half(like.scalar_type());
  if (!bucket.parameter.defined()) bucket.parameter = at::zeros({bucket.held.size()}, options);
  flats.parameter = bucket.parameter;
  flats.weight = flats.master ? at::zeros({length}, state_options)
                              : flats.parameter.narrow(0, bucket.updated.begin - bucket.held.begin, length);
  const Moments moments = moments_of(optimizer_);
  if (moments.momentum) flats.momentum = at::zeros({length}, state_options);
  if (moments.mean) flats.mean = at::zeros({length}, state_options);
  if (moments.square) flats.square = at::zeros({length}, state_options);
  const bool counted = counts_updates(optimizer_) && !like.is_cpu();

  for (const Sink* sink : bucket.sinks) {
    if (counted) counts_.make_place(*sink);
    if (states_.size() <= static_cast<size_t>(sink->index)) states_.resize(sink->index + 1);
    State& state = states_[sink->index];
    const State old = state;
    state.weight = place(flats.weight, bucket.updated, *sink);
    state.momentum = place(flats.momentum, bucket.updated, *sink);
    state.mean = place(flats.mean, bucket.updated, *sink);
    state.square = place(flats.square, bucket.updated, *sink);

    const bool whole = bucket.held.size() == bucket.numel;
    state.home = whole ? view_in(flats.parameter, sink->slot.offset, *sink) : at::Tensor();
    state.version = ~sink->parameter._version();  // look at it now
    if (old.weight.defined()) state.weight.copy_(old.weight);
    if (old.momentum.defined()) state.momentum.copy_(old.momentum);
    if (old.mean.defined()) state.mean.copy_(old.mean);
    if (old.square.defined()) state.square.copy_(old.square);
    follow_user(bucket, *sink, flats);
  }
  return flats;
}

// The parameter is the truth: one that was assigned new memory moves home, and a master follows a parameter that it does
// not round to any more.
void Updater::follow_user(const Bucket& bucket, const Sink& sink, const Flats& flats) {
  State& state = states_[sink.index];
  at::Tensor parameter = sink.parameter;
  const bool away = state.home.defined() && parameter.const_data_ptr() != state.home.const_data_ptr();
  const Range mine = flats.master ? overlap(sink.slot, parameter.numel(), bucket.updated) : Range{};
  at::Tensor now;  // what this rank's master stands for
  if (mine.size() > 0) now = flats.parameter.narrow(0, mine.begin - bucket.held.begin, mine.size());
  if (!away && parameter._version() == state.version) {
    // A change through p.data() leaves no trace but the values. A device would make the host wait for them.
    if (!now.defined() || !now.is_cpu() || now.equal(state.weight.to(now.scalar_type()))) return;
  }
  check(rank_, !capturing(parameter.device()) || !(away || flats.master),
        "parameter '" + sink.name +
            "' was changed since the last step, and step() is captured into a graph, which would "
            "copy it back at every replay; run a step first");
  if (away) {
    check(rank_, parameter.scalar_type() == state.home.scalar_type() && parameter.sizes() == state.home.sizes(),
          c10::str("parameter '", sink.name, "' became ", parameter.scalar_type(), " ", parameter.sizes(), "; it was ",
                   state.home.scalar_type(), " ", state.home.sizes(),
                   " when its engine was built; build a new engine after changing a model"));
    state.home.copy_(parameter);
    keep_for_current(parameter);
    parameter.set_data(state.home);
  }
  if (now.defined()) {
    state.weight.copy_(at::where(state.weight.to(now.dtype()) == now, state.weight, now.to(state.weight.dtype())));
  }
  state.version = parameter._version();
}

void Updater::prepare(std::deque<Bucket>& buckets) {
  if (std::holds_alternative<NoOptimizer>(optimizer_)) return;
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets) {
    if (!bucket.has_gradient()) continue;
    const Flats& flats = flats_of(bucket);
    for (const Sink* sink : bucket.sinks) {
      follow_user(bucket, *sink, flats);
      if (sink->grad().defined()) check_begun(bucket, {.first = sink});
    }
  }
}

void Updater::bring_home(std::deque<Bucket>& buckets) {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets) {
    const auto kept = [&](const Sink* sink) {
      return static_cast<size_t>(sink->index) < states_.size() && states_[sink->index].weight.defined();
    };
    // Buckets were made anew, and no step has updated this one since: its parameters lie where they lay before.
    const bool movable = !bucket.captured && !capturing(bucket.device());
    if (!is_home(bucket) && movable && std::ranges::any_of(bucket.sinks, kept)) flats_of(bucket);
    if (!is_home(bucket)) continue;
    for (const Sink* sink : bucket.sinks) follow_user(bucket, *sink, flats_[bucket.index]);
  }
}

void Updater::step(std::deque<Bucket>& buckets, Group& shard, double factor, Ledger& ledger, Fault fault,
                   const Where& where) {
  at::NoGradGuard no_grad;
  const bool updates = !std::holds_alternative<NoOptimizer>(optimizer_);
  std::deque<Pending> gathers;
  const bool captured = any_captured(buckets);
  if (captured) ++captures_;
  Together together;
  if (updates) count(buckets);
  for (Bucket& bucket : buckets) {
    if (!updates || !bucket.has_gradient()) continue;
    const Flats& flats = flats_of(bucket);
    const auto alike = [&](const Sink& a, const Sink& b) {
      const State& one = states_[a.index];
      const State& other = states_[b.index];
      return one.steps == other.steps && one.graphs == other.graphs &&
             (!rates_.grouped() || rates_.of(a.name) == rates_.of(b.name));
    };
    for (const Run& run : runs_of(bucket, bucket.updated, alike)) add_run(together, bucket, flats, run, factor);
    // What others wait for goes out while the next ones are updated.
    if (travels(bucket) || together.bytes > kCastBytes) update_all(together);
    spread(bucket, shard, gathers, where);
  }
  update_all(together);
  for (Bucket& bucket : buckets) {
    for (Sink* sink : bucket.sinks) {
      if (!sink->grad().defined()) continue;
      if (fault != Fault::consume_never) ledger.consumed(sink->index);
      if (fault == Fault::consume_twice) ledger.consumed(sink->index);
      if (!updates) continue;
      if (captured) states_[sink->index].graphs = states_[sink->index].graphs * 1'000'003 + captures_;
      updated(*sink);
    }
  }
  for (Pending& gather : gathers) gather.wait(where);
}

// Whole parameters get the parts that other ranks updated.
void Updater::spread(const Bucket& bucket, Group& shard, std::deque<Pending>& gathers, const Where& where) {
  if (!travels(bucket)) return;
  const at::Tensor mine = bucket.parameter.narrow(0, bucket.updated.begin, bucket.updated.size());
  gathers.push_back(shard.all_gather(bucket.parameter, mine));
  // A backend may hold a copy of each that is under way. On a device, waiting would hold up the next update.
  if (bucket.device().is_cpu() && gathers.size() >= size_t{kUpdatesAtATime}) {
    gathers.front().wait(where);
    gathers.pop_front();
  }
}

void Updater::updated(Sink& sink) {
  State& state = states_[sink.index];
  ++state.steps;
  // It was written through the flat tensor; graphs that saved this parameter must learn that it changed.
  sink.parameter.unsafeGetTensorImpl()->bump_version();
  state.version = sink.parameter._version();
}

Updater::Memory Updater::memory_of(const Sink& sink) const {
  if (static_cast<size_t>(sink.index) >= states_.size()) return {};
  const State& state = states_[sink.index];
  if (!state.weight.defined()) return {};
  Memory memory{.momentum = state.momentum, .mean = state.mean, .square = state.square, .updates = state.steps};
  // Replays of a captured step count on the device alone.
  if (const at::Tensor& count = counts_.of(sink); count.defined()) {
    memory.updates = std::max(memory.updates, count.item().toLong());
  }
  if (state.weight.scalar_type() != sink.parameter.scalar_type()) memory.master = state.weight;
  return memory;
}

Updater::Kept Updater::kept_of(const at::Tensor& parameter) const {
  const bool half = is_half(parameter.scalar_type());
  const Moments moments = moments_of(optimizer_);
  const bool updates = !std::holds_alternative<NoOptimizer>(optimizer_);
  return {{{"master", updates && half && master_weights_},
           {"momentum", moments.momentum},
           {"mean", moments.mean},
           {"square", moments.square}},
          half ? at::kFloat : parameter.scalar_type()};
}

void Updater::make_room(std::deque<Bucket>& buckets, const std::vector<int64_t>& updates) {
  if (std::holds_alternative<NoOptimizer>(optimizer_)) return;
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets) {
    const auto wanted = [&](const Sink* sink) { return updates[sink->index] > 0; };
    if (std::any_of(bucket.sinks.begin(), bucket.sinks.end(), wanted)) flats_of(bucket);
  }
}

void Updater::forget(std::deque<Bucket>& buckets, const std::vector<int64_t>& updates) {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets) {
    for (const Sink* sink : bucket.sinks) {
      if (static_cast<size_t>(sink->index) >= states_.size()) continue;
      State& state = states_[sink->index];
      state.steps = updates[sink->index];
      state.graphs = 0;
      if (const at::Tensor& count = counts_.of(*sink); count.defined()) count.fill_(state.steps);
      for (const at::Tensor& moment : {state.momentum, state.mean, state.square}) {
        if (moment.defined()) moment.zero_();
      }
      // A master that rounds to nothing follows its parameter.
      if (memory_of(*sink).master.defined()) state.weight.fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }
}

void Updater::filled(std::deque<Bucket>& buckets) {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets) {
    if (!is_home(bucket)) continue;
    for (const Sink* sink : bucket.sinks) {
      State& state = states_[sink->index];
      if (!state.weight.defined()) continue;
      // The parameter's memory may have been exchanged by the user; its values come home.
      state.version = ~sink->parameter._version();
      follow_user(bucket, *sink, flats_[bucket.index]);
    }
  }
}

void Updater::count(const std::deque<Bucket>& buckets) {
  if (!counts_updates(optimizer_)) return;
  std::vector<bool> updated(states_.size());
  for (const Bucket& bucket : buckets) {
    for (const Sink* sink : bucket.sinks) {
      if (sink->grad().defined()) updated[sink->index] = true;
    }
  }
  counts_.count(updated);
}

// The first update of a momentum is another one than those that follow.
void Updater::check_begun(const Bucket& bucket, const Run& run) const {
  const auto* sgd = std::get_if<SGD>(&optimizer_);
  if (sgd == nullptr || sgd->momentum == 0 || states_[run.first->index].steps > 0 || !capturing(bucket.device()))
    return;
  throw Error(rank_, "step() is captured into a graph with the first gradient of parameter '" + run.first->name +
                         "', which begins its momentum; run a step with it first");
}

void Updater::add_run(Together& together, const Bucket& bucket, const Flats& flats, const Run& run, double factor) {
  const Rates::Values values = rates_.of(run.first->name);
  const State& state = states_[run.first->index];
  // Half precision is updated in f32: libtorch's fused SGD for bf16 on the CPU is wrong by percents (seen in 2.13).
  const at::Tensor stored = part(flats.weight, bucket.updated, run);
  const at::Tensor reduced = part(bucket.gradient, bucket.kept, run);
  const auto mine = [&](const at::Tensor& flat) { return flat.defined() ? part(flat, bucket.updated, run) : flat; };
  Operands operands;
  operands.weight = is_half(stored.scalar_type()) ? stored.to(at::kFloat) : stored;
  const at::ScalarType dtype = operands.weight.scalar_type();
  operands.gradient = reduced.scalar_type() == dtype ? reduced : reduced.to(dtype);
  operands.momentum = mine(flats.momentum);
  operands.mean = mine(flats.mean);
  operands.square = mine(flats.square);
  operands.first = state.steps == 0;
  operands.lr = values.lr * factor;
  operands.weight_decay = values.weight_decay;
  if (counts_updates(optimizer_)) {
    operands.count = counts_.of(*run.first);
    if (!operands.count.defined()) {
      if (!together.count.defined() || together.counted != state.steps + 1) {
        together.count = at::full({}, state.steps + 1, at::kFloat);
        together.counted = state.steps + 1;
      }
      operands.count = together.count;
    }
  }
  if (!operands.weight.is_same(stored)) together.bytes += static_cast<int64_t>(operands.weight.nbytes());
  if (!operands.gradient.is_same(reduced)) together.bytes += static_cast<int64_t>(operands.gradient.nbytes());
  const at::Tensor parameter = part(flats.parameter, bucket.held, run);
  if (!parameter.is_alias_of(operands.weight)) together.copies.emplace_back(operands.weight, parameter);
  together.runs.push_back(std::move(operands));
}

void Updater::update_all(Together& together) {
  update(optimizer_, together.runs);
  for (const auto& [weight, parameter] : together.copies) parameter.copy_(weight);
  together = {};
}

}  // namespace plumb

#include "optim/update.h"

#include <ATen/ATen.h>

#include <algorithm>

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

constexpr size_t kGathers = 2;  // under way at a time

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

}  // namespace

Updater::Updater(int rank, Optimizer optimizer, const Options& options, const NamedTensors& parameters)
    : rank_(rank), optimizer_(std::move(optimizer)), groups_(options.groups), master_weights_(options.master_weights) {
  check(rank, lr() >= 0.0, "the learning rate is " + std::to_string(lr()) + "; it must not be negative");
  if (const auto* adam = std::get_if<AdamW>(&optimizer_)) {
    check(rank, adam->beta1 >= 0 && adam->beta1 < 1 && adam->beta2 >= 0 && adam->beta2 < 1,
          "AdamW's betas are " + std::to_string(adam->beta1) + " and " + std::to_string(adam->beta2) +
              "; each must be in [0, 1)");
    check(rank, adam->eps >= 0, "AdamW's eps is negative");
  }
  if (const auto* sgd = std::get_if<SGD>(&optimizer_)) {
    check(rank, sgd->momentum >= 0, "SGD's momentum is negative");
    check(rank, !sgd->nesterov || (sgd->momentum > 0 && sgd->dampening == 0),
          "SGD with nesterov needs a momentum and no dampening");
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    check(rank, groups_[i].match != nullptr, "parameter group " + std::to_string(i) + " has no `match` function");
    const bool any = std::any_of(parameters.begin(), parameters.end(),
                                 [&](const auto& parameter) { return groups_[i].match(parameter.first); });
    check(rank, any, "parameter group " + std::to_string(i) + " matches no parameter of this model");
  }
}

double Updater::lr() const {
  return std::visit(
      [](const auto& values) {
        if constexpr (requires { values.lr; }) return values.lr;
        return 0.0;
      },
      optimizer_);
}

void Updater::set_lr(double lr) {
  std::visit(
      [lr](auto& values) {
        if constexpr (requires { values.lr; }) values.lr = lr;
      },
      optimizer_);
}

Updater::Values Updater::values_of(const Sink& sink) const {
  Values values = std::visit(
      [](const auto& own) {
        if constexpr (requires { own.lr; }) return Values{own.lr, own.weight_decay};
        return Values{};
      },
      optimizer_);
  const auto group = std::find_if(groups_.begin(), groups_.end(), [&](const auto& g) { return g.match(sink.name); });
  if (group != groups_.end()) {
    values.lr = group->lr.value_or(values.lr);
    values.weight_decay = group->weight_decay.value_or(values.weight_decay);
  }
  return values;
}

// Moves the bucket's parameters into flat memory, with whatever state they had before in other buckets.
Updater::Flats& Updater::flats_of(Bucket& bucket) {
  const auto index = static_cast<size_t>(bucket.index);
  if (flats_.size() <= index) flats_.resize(index + 1);
  Flats& flats = flats_[index];
  if (bucket.parameter.defined() && flats.parameter.is_same(bucket.parameter)) return flats;

  const at::Tensor& like = bucket.sinks[0]->parameter;
  check(rank_, !capturing(like.device()),
        "step() is captured into a graph before the memory of its parameters is laid out, beginning with '" +
            bucket.sinks[0]->name + "'; run a step with the same gradients first, on the same stream");
  const int64_t length = bucket.updated.size();
  const auto options = at::TensorOptions().device(like.device()).dtype(like.scalar_type());
  const auto state_options = is_half(like.scalar_type()) ? options.dtype(at::kFloat) : options;
  // What lies elsewhere now is read here, and then freed.
  for (const at::Tensor& old : {flats.parameter, flats.weight, flats.first, flats.second, flats.counts})
    keep_for_current(old);
  flats.master = master_weights_ && is_half(like.scalar_type());
  if (!bucket.parameter.defined()) bucket.parameter = at::zeros({bucket.held.size()}, options);
  flats.parameter = bucket.parameter;
  flats.weight = flats.master ? at::zeros({length}, state_options)
                              : flats.parameter.narrow(0, bucket.updated.begin - bucket.held.begin, length);
  const bool adam = std::holds_alternative<AdamW>(optimizer_);
  const auto* sgd = std::get_if<SGD>(&optimizer_);
  if (adam || (sgd != nullptr && sgd->momentum != 0)) flats.first = at::zeros({length}, state_options);
  if (adam) flats.second = at::zeros({length}, state_options);
  const auto members = static_cast<int64_t>(bucket.sinks.size());
  if (adam && !like.is_cpu()) flats.counts = at::zeros({members}, options.dtype(at::kFloat));

  for (int64_t i = 0; i < members; ++i) {
    Sink* sink = bucket.sinks[i];
    if (states_.size() <= static_cast<size_t>(sink->index)) states_.resize(sink->index + 1);
    State& state = states_[sink->index];
    const State old = state;
    state.weight = place(flats.weight, bucket.updated, *sink);
    state.first = place(flats.first, bucket.updated, *sink);
    state.second = place(flats.second, bucket.updated, *sink);
    if (flats.counts.defined()) state.count = flats.counts.select(0, i);

    const bool whole = bucket.held.size() == bucket.numel;
    state.home = whole ? view_in(flats.parameter, sink->slot.offset, sink->parameter) : at::Tensor();
    state.version = ~sink->parameter._version();  // look at it now
    if (old.weight.defined()) state.weight.copy_(old.weight);
    if (old.first.defined()) state.first.copy_(old.first);
    if (old.second.defined()) state.second.copy_(old.second);
    if (old.count.defined()) state.count.copy_(old.count);
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

void Updater::step(std::deque<Bucket>& buckets, Group& shard, double factor, Ledger& ledger, Fault fault,
                   const Where& where) {
  at::NoGradGuard no_grad;
  const bool updates = !std::holds_alternative<NoOptimizer>(optimizer_);
  std::deque<Pending> gathers;
  const bool captured =
      std::any_of(buckets.begin(), buckets.end(), [](const Bucket& bucket) { return capturing(bucket.device()); });
  if (captured) ++captures_;
  for (Bucket& bucket : buckets) {
    if (updates && bucket.has_gradient()) {
      Flats& flats = flats_of(bucket);
      for (const Sink* sink : bucket.sinks) follow_user(bucket, *sink, flats);
      count(bucket, flats);
      const auto alike = [&](const Sink& a, const Sink& b) {
        const State& one = states_[a.index];
        const State& other = states_[b.index];
        return one.steps == other.steps && one.graphs == other.graphs &&
               (groups_.empty() || values_of(a) == values_of(b));
      };
      for (const Run& run : runs_of(bucket, bucket.updated, alike)) update(bucket, flats, run, factor);
      if (bucket.updated.size() < bucket.held.size()) {
        const at::Tensor mine = bucket.parameter.narrow(0, bucket.updated.begin, bucket.updated.size());
        gathers.push_back(shard.all_gather(bucket.parameter, mine));
        // A backend may hold a copy of each that is under way. On a device, waiting would hold up the next update.
        if (bucket.device().is_cpu() && gathers.size() > kGathers) {
          gathers.front().wait(where);
          gathers.pop_front();
        }
      }
    }
    for (Sink* sink : bucket.sinks) {
      if (!sink->grad().defined()) continue;
      if (fault != Fault::consume_never) ledger.consumed(sink->index);
      if (fault == Fault::consume_twice) ledger.consumed(sink->index);
      if (!updates) continue;
      State& state = states_[sink->index];
      ++state.steps;
      if (captured) state.graphs = state.graphs * 1'000'003 + captures_;
      // The kernel wrote through the flat tensor; graphs that saved this parameter must learn that it changed.
      sink->parameter.unsafeGetTensorImpl()->bump_version();
      state.version = sink->parameter._version();
    }
  }
  for (Pending& gather : gathers) gather.wait(where);
}

// One more update of every member that has a gradient.
void Updater::count(const Bucket& bucket, const Flats& flats) {
  if (!flats.counts.defined()) return;
  const auto active = [&](int64_t i) { return bucket.sinks[i]->grad().defined(); };
  const auto members = static_cast<int64_t>(bucket.sinks.size());
  for (int64_t begin = 0, end = 0; begin < members; begin = end + 1) {
    for (end = begin; end < members && active(end);) ++end;
    if (end > begin) flats.counts.narrow(0, begin, end - begin).add_(1);
  }
}

void Updater::update(const Bucket& bucket, const Flats& flats, const Run& run, double factor) {
  const Values values = values_of(*run.first);
  const int64_t steps = states_[run.first->index].steps;
  // Half precision is updated in f32: libtorch's fused SGD for bf16 on the CPU is wrong by percents (seen in 2.13).
  const at::Tensor stored = part(flats.weight, bucket.updated, run);
  const at::Tensor weight = is_half(stored.scalar_type()) ? stored.to(at::kFloat) : stored;
  const at::Tensor gradient = part(bucket.gradient, bucket.kept, run).to(weight.scalar_type());
  const double lr = values.lr * factor;
  if (const auto* adam = std::get_if<AdamW>(&optimizer_)) {
    const at::Tensor& known = states_[run.first->index].count;
    const at::Tensor count = known.defined() ? known : at::full({}, steps + 1, weight.options().dtype(at::kFloat));
    at::_fused_adamw_({weight}, {gradient}, {part(flats.first, bucket.updated, run)},
                      {part(flats.second, bucket.updated, run)}, {}, {count}, lr, adam->beta1, adam->beta2,
                      values.weight_decay, adam->eps, /*amsgrad=*/false, /*maximize=*/false);
  } else if (const auto* sgd = std::get_if<SGD>(&optimizer_)) {
    if (steps == 0 && sgd->momentum != 0 && capturing(weight.device())) {
      throw Error(rank_, "step() is captured into a graph with the first gradient of parameter '" + run.first->name +
                             "', which begins its momentum; run a step with it first");
    }
    std::vector<at::Tensor> momentum;
    if (flats.first.defined()) momentum.push_back(part(flats.first, bucket.updated, run));
    at::_fused_sgd_({weight}, {gradient}, momentum, values.weight_decay, sgd->momentum, lr, sgd->dampening,
                    sgd->nesterov, /*maximize=*/false, /*is_first_step=*/steps == 0);
  }
  const at::Tensor parameter = part(flats.parameter, bucket.held, run);
  if (!parameter.is_alias_of(weight)) parameter.copy_(weight);
}

}  // namespace plumb

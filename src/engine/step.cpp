// A step: from gradients that every rank agrees on to parameters that every rank has, and what may be asked and set
// between two of them.
#include <ATen/ATen.h>

#include <limits>

#include "engine/impl.h"
#include "engine/not_finite.h"
#include "engine/saving.h"
#include "engine/slots.h"
#include "grad/mode.h"
#include "nn/groups.h"
#include "watch/road.h"
#include "watch/strike.h"
#include "watch/timeline.h"

namespace plumb {
namespace {

// What this rank holds of the first parameter that it holds anything of.
at::Tensor first_held(Engine::Impl& impl) {
  for (const SavedSlot& slot : slots_of(impl, {})) {
    if (slot.kind == save::Kind::weight && slot.memory.defined() && slot.memory.numel() > 0) return slot.memory;
  }
  return impl.parameters[0].second;
}

}  // namespace

StepInfo Engine::Impl::begin_step() {
  nn::raise_complaint(world.rank());
  road_of(world).pass(Point::step);
  if (saving) saving->poll();
  if (in_step) throw Error(world.rank(), "a step is under way already; end_step() ends it");
  timeline_of(world).enter(doing::step);
  const bool pieces = reducer->shards(reducer->row().gradient);
  reducer->settings = updater->rates().settings();
  reducer->settings.insert(reducer->settings.end(), user_settings.begin(), user_settings.end());
  const bool scaled = !scaler.on() || scaler.scale() == 1.0 || scales || reducer->here(Where::Kind::step).pass == 0;
  if (scaler.on()) reducer->settings.emplace_back("whether a loss was scaled (1: yes)", scaled);
  reducer->settle_step();
  if (!scaled) {
    reducer->refuse_step();
    throw Error(
        world.rank(),
        "step() with Options::loss_scale after backwards of losses that were never scaled, so that their gradients "
        "would be divided for nothing; call engine.backward(loss), or engine.scale(loss).backward()");
  }
  StepInfo info;
  info.step = reducer->steps();
  const double factor = options.schedule.factor(info.step);
  info.lr = updater->rates().lr() * factor;
  for (const double lr : updater->rates().group_lrs()) info.group_lrs.push_back(lr * factor);
  info.loss_scale = scaler.scale();
  if (saving) saving->settle();
  check_capture();
  // Whatever may refuse the step does so before a gradient or a parameter is changed.
  if (units) units->begin_update();
  reducer->begin_layout();
  updater->prepare(reducer->buckets());
  if (scaler.on() || options.nonfinite != NonFinite::proceed) {
    info.skipped = !gradients_are_finite(reducer->buckets(), pieces, reducer->shard(),
                                         reducer->here(Where::Kind::step, "whether all gradients are finite"));
  }
  if (info.skipped && options.nonfinite == NonFinite::error) refuse_nonfinite();
  reducer->summing().forget_looks();
  if (!info.skipped) {
    scaler.unscale(reducer->buckets());
    const double weight = reducer->take_weight_factor();
    if (weight != 1.0) scale_gradients(reducer->buckets(), at::scalar_tensor(weight, at::kDouble));
    if (options.clip_norm) {
      info.grad_norm = gradient_norm(reducer->buckets(), pieces, reducer->shard(), norm_order(),
                                     reducer->here(Where::Kind::step, "the gradient norm"));
      clip_gradients(reducer->buckets(), info.grad_norm, *options.clip_norm);
    }
  }
  in_step = true;
  reducer->begin_update();
  skipped = info.skipped;
  if (skipped) end_step();
  return info;
}

void Engine::Impl::end_step() {
  in_step = false;
  road_of(world).pass(Point::publish);
  if (strikes::flips(world.rank(), Point::publish)) flip_a_bit(first_held(*this));
  std::vector<bool> active;
  for (const Sink& sink : reducer->sinks()) {
    active.push_back(!skipped && sink.grad().defined());
    if (skipped) reducer->ledger().consumed(sink.index);
  }
  if (units) units->end_update();
  reducer->ledger().close_step(active);
  broadcast(buffers, reducer->here(Where::Kind::step, "the broadcast of rank 0's buffers"));
  if (scaler.on()) scaler.settle(skipped);
  if (Timeline& timeline = timeline_of(world); timeline.on()) {
    timeline.mark(tracks::steps, "step " + std::to_string(reducer->steps()));
    timeline.enter(doing::forward);
  }
  reducer->finish_step();
}

StepInfo Engine::step() {
  const TrainingMode training;
  Impl& impl = *impl_;
  if (impl.updater->is_users()) {
    throw Error(impl.world.rank(),
                "step() of an engine whose optimizer is the user's own; call begin_step(), update "
                "pieces(), and call end_step()");
  }
  const StepInfo info = impl.begin_step();
  if (info.skipped) return info;
  Reducer& reducer = *impl.reducer;
  timeline_of(impl.world).enter(doing::optimizer);
  road_of(impl.world).pass(Point::update);
  impl.updater->step(reducer.buckets(), reducer.shard(), impl.options.schedule.factor(info.step), reducer.ledger(),
                     reducer.fault, reducer.here(Where::Kind::step, "the updated parameters"));
  timeline_of(impl.world).enter(doing::step);
  impl.end_step();
  return info;
}

StepInfo Engine::begin_step() {
  const TrainingMode training;
  if (!impl_->updater->is_users()) {
    throw Error(impl_->world.rank(), "begin_step() of an engine that has an optimizer; call step()");
  }
  const StepInfo info = impl_->begin_step();
  if (!info.skipped) timeline_of(impl_->world).enter(doing::optimizer);
  return info;
}

std::vector<Piece> Engine::pieces() {
  const TrainingMode training;
  if (!impl_->in_step) throw Error(impl_->world.rank(), "pieces() outside of a step; call begin_step() first");
  return impl_->updater->lend(impl_->reducer->buckets());
}

void Engine::end_step() {
  const TrainingMode training;
  if (!impl_->in_step) throw Error(impl_->world.rank(), "end_step() without begin_step()");
  Reducer& reducer = *impl_->reducer;
  timeline_of(impl_->world).enter(doing::step);
  road_of(impl_->world).pass(Point::update);
  impl_->updater->take_back(reducer.buckets(), reducer.shard(), reducer.ledger(),
                            reducer.here(Where::Kind::step, "the updated parameters"));
  impl_->end_step();
}

// Names who is not finite, alike on every rank. The step may be taken again with other gradients.
void Engine::Impl::refuse_nonfinite() {
  constexpr size_t most = 5;  // names in a message
  constexpr int64_t nobody = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> finite = finite_sinks(reducer->buckets(), reducer->sinks().size());
  finite.push_back(reducer->summing().first_not_finite().value_or(nobody));
  reducer->summing().forget_looks();
  const auto all = reducer->control().exchange(finite, reducer->here(Where::Kind::step, "what is not finite"));
  // Once one rank's NaN is in a sum that all keep, the later messages of all have it.
  std::string origin;
  int64_t first = nobody;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t i = 0; i < finite.size(); ++i) finite[i] = std::min(finite[i], all[rank][i]);
    if (all[rank].back() >= first) continue;
    first = all[rank].back();
    origin = " (that of rank " + std::to_string(rank) + " was not, in backward " + std::to_string(first) +
             ", before it was summed)";
  }
  std::string names;
  size_t count = 0;
  for (const Sink& sink : reducer->sinks()) {
    if (finite[sink.index] != 0 || ++count > most) continue;
    names += (names.empty() ? "'" : ", '") + sink.name + "'";
  }
  if (units) units->end_update();
  reducer->refuse_step();
  throw NotFinite(world.rank(), "step " + std::to_string(reducer->steps()) + ": the gradient of " + names +
                                    (count > most ? " and " + std::to_string(count - most) + " more" : "") +
                                    " is not finite" + origin +
                                    ", and Options::nonfinite is error: nothing was updated");
}

void Engine::Impl::check_capture() const {
  if (!options.loss_scale && options.nonfinite == NonFinite::proceed && !(options.deterministic && options.clip_norm))
    return;
  reducer->for_devices([&](c10::Device device) {
    if (!capturing(device)) return;
    throw Error(world.rank(), std::string("step() cannot be captured into a graph with ") +
                                  (options.loss_scale                        ? "loss scaling"
                                   : options.nonfinite != NonFinite::proceed ? "a look at gradients that are not finite"
                                                                             : "deterministic clipping") +
                                  ": the host decides by numbers of the device");
  });
}

at::Tensor Engine::grad_norm() {
  const TrainingMode training;
  at::NoGradGuard no_grad;
  Reducer& reducer = *impl_->reducer;
  reducer.check_reduced("grad_norm()");
  const bool pieces = reducer.shards(reducer.row().gradient);
  const Sink* own = first_unreduced(reducer.buckets(), pieces);
  std::vector<int64_t> unreduced = {own == nullptr ? -1 : own->index};  // by rank
  if (pieces) {
    const auto all = reducer.control().exchange(unreduced, reducer.here(Where::Kind::step, "grad_norm()"));
    unreduced.clear();
    for (const auto& theirs : all) unreduced.push_back(theirs[0]);
  }
  for (size_t rank = 0; rank < unreduced.size(); ++rank) {
    if (unreduced[rank] < 0) continue;
    throw Error(impl_->world.rank(), "grad_norm() while .grad of parameter '" + reducer.sinks()[unreduced[rank]].name +
                                         "'" +
                                         (pieces ? " on rank " + std::to_string(rank) +
                                                       " is a whole gradient that step() will reduce; ask "
                                                       "for the norm before it is assigned"
                                                 : " has another shape than the parameter"));
  }
  const at::Tensor norm = shown_norm(reducer.buckets(), pieces, reducer.shard(), impl_->norm_order(),
                                     reducer.here(Where::Kind::step, "the gradient norm"));
  return impl_->scaler.on() ? norm / impl_->scaler.of_gradients() : norm;
}

double Engine::lr() const { return impl_->updater->rates().lr(); }
double Engine::lr(int group) const { return impl_->updater->rates().lr(group); }
void Engine::set_lr(double lr) { impl_->updater->rates().set_lr(lr); }
void Engine::set_lr(int group, double lr) { impl_->updater->rates().set_lr(group, lr); }

}  // namespace plumb

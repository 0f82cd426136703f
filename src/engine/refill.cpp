#include "engine/refill.h"

#include <ATen/ATen.h>

#include "engine/filling.h"
#include "engine/saving.h"
#include "grad/mode.h"

namespace plumb {

using save::Json;

namespace {

std::map<std::string, int64_t> all_updated(Engine::Impl& impl) {
  std::map<std::string, int64_t> updates;
  for (const Sink& sink : impl.reducer->sinks()) updates[sink.name] = 1;
  return updates;
}

}  // namespace

std::vector<SavedSlot> all_slots(Engine::Impl& impl) {
  impl.reducer->serve_gathers(impl.reducer->here(Where::Kind::step, "state_dict()"));
  impl.reducer->check_between_steps("state_dict()");
  if (impl.saving) impl.saving->settle();  // masters follow parameters that were changed
  impl.reducer->arrange(impl.reducer->order());
  impl.updater->make_room(impl.reducer->buckets(), std::vector<int64_t>(impl.reducer->sinks().size(), 1));
  if (impl.units) impl.units->begin_update();
  std::vector<SavedSlot> slots = slots_of(impl, all_updated(impl));
  if (impl.units) impl.units->end_update();
  return slots;
}

Json::Object words_of(Engine::Impl& impl) {
  Json::Object updates;
  for (const auto& [name, count] : updates_of(impl)) updates.emplace_back(name, count);
  Json::Array group_lrs;
  for (const double lr : impl.updater->rates().group_lrs()) group_lrs.emplace_back(lr);
  Json scale;
  if (impl.scaler.on()) {
    scale = Json::Object{
        {"scale", impl.scaler.scale()}, {"good_steps", impl.scaler.good_steps()}, {"patience", impl.scaler.patience()}};
  }
  return {{"step", impl.reducer->steps()},
          {"optimizer", optimizer_name(impl.updater->optimizer())},
          {"lr", impl.updater->rates().lr()},
          {"group_lrs", std::move(group_lrs)},
          {"loss_scale", std::move(scale)},
          {"virtual_ranks", impl.options.deterministic ? impl.options.virtual_ranks : 0},
          {"updates", std::move(updates)}};
}

void check_words(Engine::Impl& impl, const Json& words) {
  const Json mine = words_of(impl);
  const auto outer = [](const std::string& name) {
    return name == optimizer_name(NoOptimizer{}) || name == optimizer_name(UserOptimizer{});
  };
  const std::string what = "a checkpoint's words";
  const std::string& theirs = words.at("optimizer", what).text("'optimizer'");
  const std::string& ours = mine.at("optimizer", what).text("'optimizer'");
  if (theirs != ours && !(outer(theirs) && outer(ours))) {
    throw Error("the checkpoint is of the optimizer " + theirs + ", and this engine has " + ours);
  }
  const Json* scale = words.find("loss_scale");
  if ((scale == nullptr || scale->is_null()) == impl.scaler.on()) {
    throw Error(std::string("the checkpoint has ") + (impl.scaler.on() ? "no" : "a") +
                " loss scale, and this engine has " + (impl.scaler.on() ? "one" : "none"));
  }
  const size_t groups = words.at("group_lrs", what).array("'group_lrs'").size();
  if (groups != impl.options.groups.size()) {
    throw Error("the checkpoint has " + std::to_string(groups) + " parameter groups, and this engine " +
                std::to_string(impl.options.groups.size()));
  }
  const int64_t shares = words.at("virtual_ranks", what).integer("'virtual_ranks'");
  if (shares > 0 && impl.options.deterministic && shares != impl.options.virtual_ranks) {
    throw Error("the checkpoint is of " + std::to_string(shares) + " virtual ranks, and this engine has " +
                std::to_string(impl.options.virtual_ranks));
  }
  impl.reducer->serve_gathers(impl.reducer->here(Where::Kind::step, "load_state_dict()"));
  impl.reducer->check_between_steps("load_state_dict()");
}

void refill(Engine::Impl& impl, const std::vector<at::Tensor>& values, const Json& words) {
  const TrainingMode training;
  at::NoGradGuard no_grad;
  const std::vector<SavedSlot> slots = all_slots(impl);
  TORCH_CHECK(slots.size() == values.size(), "plumb: ", values.size(), " values for ", slots.size(), " slots");
  const std::string what = "a checkpoint's words";
  std::map<std::string, int64_t> counts;
  for (const auto& [name, count] : words.at("updates", what).object("'updates'")) {
    counts[name] = count.integer("the updates of '" + name + "'");
  }
  const bool counts_updates = !std::holds_alternative<NoOptimizer>(impl.updater->optimizer());
  std::vector<int64_t> updates;
  for (const Sink& sink : impl.reducer->sinks()) updates.push_back(counts_updates ? counts[sink.name] : 0);
  std::vector<Filling> fillings;
  for (size_t i = 0; i < slots.size(); ++i) fillings.push_back({slots[i], values[i]});
  fill(impl, fillings, [&] { impl.updater->forget(impl.reducer->buckets(), updates); });
  Rates& rates = impl.updater->rates();
  if (counts_updates && !impl.updater->is_users()) {
    rates.set_lr(words.at("lr", what).number("'lr'"));
    const auto& groups = words.at("group_lrs", what).array("'group_lrs'");
    for (size_t i = 0; i < groups.size(); ++i) {
      const double lr = groups[i].number("'group_lrs'");
      if (rates.lr(static_cast<int>(i)) != lr) rates.set_lr(static_cast<int>(i), lr);
    }
  }
  if (impl.scaler.on()) {
    const Json& scale = words.at("loss_scale", what);
    impl.scaler.restore(scale.at("scale", what).number("the loss scale"),
                        scale.at("good_steps", what).integer("good steps"),
                        scale.at("patience", what).integer("the loss scale's patience"));
  }
  impl.reducer->resume(words.at("step", what).integer("'step'"));
  impl.reducer->gradients_cleared();
}

}  // namespace plumb

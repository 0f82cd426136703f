// Whose a parameter is, and what becomes of changes the user makes to it.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "plumb/error.h"
#include "unit/storage.h"
#include "unit/units.h"

namespace plumb {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

bool Units::owns(const at::Tensor& parameter) const { return home_of_.contains(parameter.unsafeGetTensorImpl()); }

bool Units::owns_memory_of(const at::Tensor& parameter) const {
  return parameter.has_storage() && is_home(parameter.storage().unsafeGetStorageImpl());
}

std::vector<Units::Home*> Units::homes_of(const std::vector<at::Tensor>& parameters) const {
  std::vector<Home*> homes;
  for (const at::Tensor& parameter : parameters) {
    Home* home = nullptr;
    if (owns(parameter)) {
      home = home_of_.at(parameter.unsafeGetTensorImpl());
    } else if (owns_memory_of(parameter)) {
      home = homes_of_.at(parameter.storage().unsafeGetStorageImpl());
    } else {
      continue;
    }
    if (std::find(homes.begin(), homes.end(), home) == homes.end()) homes.push_back(home);
  }
  return homes;
}

std::vector<uint32_t> Units::versions(const Home& home) {
  std::vector<uint32_t> all;
  for (const Sink* sink : home.bucket->sinks) all.push_back(sink->parameter._version());
  return all;
}

// A parameter that was given other memory (set_data, torch::load) comes home with its values: all of them while the home
// is whole, otherwise this rank's part.
void Units::bring_home(Home& home) {
  at::NoGradGuard no_grad;
  Bucket& bucket = *home.bucket;
  bool filled = false;  // with nothing but what came home
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    const Sink* sink = bucket.sinks[i];
    at::Tensor parameter = sink->parameter;
    if (parameter.storage().unsafeGetStorageImpl() == home.places[i].storage().unsafeGetStorageImpl()) continue;
    if (parameter.scalar_type() != home.whole.scalar_type() || parameter.device() != home.whole.device() ||
        parameter.sizes() != home.shapes[i]) {
      throw Error(reducer_.world().rank(),
                  c10::str("parameter '", sink->name, "' became ", parameter.scalar_type(), " ", parameter.sizes(),
                           " on ", parameter.device(), "; it was ", home.whole.scalar_type(), " ",
                           at::IntArrayRef(home.shapes[i]), " on ", home.whole.device(),
                           " when its engine was built; build a new engine after changing a model"));
    }
    if (!home.full) {
      c10::StorageImpl& storage = *home.whole.storage().unsafeGetStorageImpl();
      fill_storage(storage, storage.allocator()->allocate(home.whole.nbytes()), home.whole.nbytes());
      lend(home);
      home.full = filled = true;
    }
    const Range mine = overlap(sink->slot, parameter.numel(), bucket.held);
    const at::Tensor flat = at::empty({parameter.numel()}, home.whole.options());
    view_in(flat, 0, parameter).copy_(parameter);
    home.whole.narrow(0, sink->slot.offset, parameter.numel()).copy_(flat);
    bucket.parameter.narrow(0, std::clamp<int64_t>(mine.begin - bucket.held.begin, 0, bucket.held.size()), mine.size())
        .copy_(flat.narrow(0, mine.begin - sink->slot.offset, mine.size()));
    keep_for_current(parameter);
    parameter.set_data(view_in(home.places[i], 0, parameter));
    parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (filled) release(home);
}

// What was changed through a unit, in a copy that nobody else sees.
void Units::note_changes(int unit) {
  for (const Home* home : homes_of_unit_[unit]) {
    if (!home->full || home->holds > 1) continue;  // whoever holds it longer looks
    for (size_t i = 0; i < home->versions.size(); ++i) {
      const Sink& sink = *home->bucket->sinks[i];
      if (sink.parameter._version() != home->versions[i] && owns_memory_of(sink.parameter)) lost_ = sink.name;
    }
  }
}

void Units::check_nothing_lost() {
  if (lost_.empty()) return;
  throw Error(reducer_.world().rank(),
              "parameter '" + std::exchange(lost_, "") +
                  "' was changed through its unit, and the change is lost: the unit holds a copy; change it on rank 0 "
                  "inside engine.gathered({...}, Access::write), on every rank");
}

void Units::publish(const std::vector<at::Tensor>& parameters, const Where& where) {
  Lock lock(mutex_);
  at::NoGradGuard no_grad;
  reducer_.control().barrier().wait(where);  // nobody reads the shards any more
  for (Home* home : homes_of(parameters)) {
    const Alone alone(home->lanes, home->whole.device());
    bring_home(*home);
    reducer_.data().broadcast(home->whole, 0).wait(where);
    const Range& held = home->bucket->held;
    home->bucket->parameter.copy_(home->whole.narrow(0, held.begin, held.size()));
    for (Sink* sink : home->bucket->sinks) sink->parameter.unsafeGetTensorImpl()->bump_version();
    home->versions = versions(*home);
  }
  reducer_.control().barrier().wait(where);
}

}  // namespace plumb

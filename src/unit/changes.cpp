// Whose a parameter is, and what becomes of changes the user makes to it.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "plumb/error.h"
#include "unit/units.h"

namespace plumb {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

bool Units::owns(const at::Tensor& parameter) const { return home_of_.contains(parameter.unsafeGetTensorImpl()); }

bool Units::owns_memory_of(const at::Tensor& parameter) const {
  return parameter.has_storage() && is_home(parameter.storage().unsafeGetStorageImpl());
}

bool Units::is_everybodys(const at::Tensor& parameter) const {
  Lock lock(mutex_);
  const Home& home = *home_of_.at(parameter.unsafeGetTensorImpl());
  const auto at =
      std::ranges::find_if(home.bucket.sinks, [&](const Sink* sink) { return sink->parameter.is_same(parameter); });
  return parameter._version() == home.versions[static_cast<size_t>(at - home.bucket.sinks.begin())];
}

std::vector<Home*> Units::homes_of(const std::vector<at::Tensor>& parameters) const {
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

// What was changed through a unit, in a copy that nobody else sees.
void Units::note_changes(int unit) {
  for (const Home* home : homes_of_unit_[unit]) {
    if (!home->full || home->holds > 1) continue;  // whoever holds it longer looks
    for (size_t i = 0; i < home->versions.size(); ++i) {
      const Sink& sink = *home->bucket.sinks[i];
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
    home->bring_home();
    reducer_.data().broadcast(home->whole, 0).wait(where);
    const Range& held = home->bucket.held;
    home->bucket.parameter.copy_(home->whole.narrow(0, held.begin, held.size()));
    // Of those beside them nothing was written: a graph that saved one goes on.
    for (Sink* sink : home->bucket.sinks) {
      const auto is_it = [&](const at::Tensor& one) { return one.is_alias_of(sink->parameter); };
      if (std::ranges::any_of(parameters, is_it)) sink->parameter.unsafeGetTensorImpl()->bump_version();
    }
    home->versions = home->versions_now();
  }
  reducer_.control().barrier().wait(where);
}

}  // namespace plumb

#include "unit/door.h"

#include <unordered_map>

#include "plumb/unit.h"
#include "unit/deferred.h"
#include "unit/units.h"

namespace plumb {
namespace unit {
namespace {

struct Doors {
  std::mutex mutex;
  std::unordered_map<const void*, std::weak_ptr<Door>> all;
};

Doors& doors() {
  static auto* instance = new Doors;  // never destroyed: modules may outlive main
  return *instance;
}

}  // namespace

std::shared_ptr<Door> door_of(const std::shared_ptr<torch::nn::Module>& module) {
  if (!module) return nullptr;
  std::shared_ptr<Door> door;
  {
    std::lock_guard lock(doors().mutex);
    std::erase_if(doors().all, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<Door>& known = doors().all[module.get()];
    door = known.lock();
    if (door) return door;
    known = door = std::make_shared<Door>();
  }
  deferred::cut(*module);
  return door;
}

std::shared_ptr<Door> find_door(const torch::nn::Module* module) {
  std::lock_guard lock(doors().mutex);
  const auto it = doors().all.find(module);
  return it == doors().all.end() ? nullptr : it->second.lock();
}

}  // namespace unit

UnitScope::UnitScope(const std::shared_ptr<unit::Door>& door) {
  if (!door) return;
  std::shared_ptr<Units> units;
  {
    std::lock_guard lock(door->mutex);
    units = door->units.lock();
    unit_ = door->number;
  }
  if (!units) return;
  units->enter(unit_);
  units_ = std::move(units);
}

UnitScope::~UnitScope() {
  if (units_) static_cast<Units*>(units_.get())->leave(unit_);
}

}  // namespace plumb

// What nodes save inside a unit's scope, and how they get it back: unpacking gathers the unit.
#pragma once

#include <memory>

namespace plumb {

class Units;

namespace saved {

// From now on, tensors saved for a backward inside a scope remember their unit, and parameters saved by a backward that
// makes a graph of its own remember theirs.
void install(const std::weak_ptr<Units>& units);

// The scopes of this thread. Unit -1: none in particular.
void push(std::shared_ptr<Units> units, int unit);
void pop();

}  // namespace saved
}  // namespace plumb

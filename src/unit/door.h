// Doors: where the holders of a unit's module and the engine that shards its parameters meet.
#pragma once

#include <memory>
#include <mutex>

namespace torch::nn {
class Module;
}

namespace plumb {

class Units;

namespace unit {

struct Door {
  std::mutex mutex;
  std::weak_ptr<Units> units;  // of the engine that shards this module
  int number = -1;             // among them
};

// The door of a module that some plumb::Unit holds; null otherwise.
std::shared_ptr<Door> find_door(const torch::nn::Module* module);

}  // namespace unit
}  // namespace plumb

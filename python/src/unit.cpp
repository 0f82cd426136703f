// Binds plumb/unit.h: a unit is entered before its module's forward and left after it, well or badly.
#include "plumb/unit.h"

#include <vector>

#include "bind.h"
#include "unit/door.h"
#include "unit/saved.h"

namespace plumb::python {
namespace {

using DoorPtr = std::shared_ptr<unit::Door>;

struct Entered {
  DoorPtr door;
  std::unique_ptr<UnitScope> scope;
};

thread_local std::vector<Entered> entered;

void enter(const DoorPtr& door) { entered.push_back({door, std::make_unique<UnitScope>(door)}); }

// A module whose entering failed is left all the same: then the last one entered is another.
void leave(const DoorPtr& door) {
  if (!entered.empty() && entered.back().door == door) entered.pop_back();
}

}  // namespace

void bind_unit(py::module_& module) {
  py::class_<unit::Door, DoorPtr>(module, "Door")
      .def(py::init<>())
      .def("enter", &enter, no_gil())
      .def("leave", &leave, no_gil());
  module.def("set_aside", &saved::set_aside);
}

}  // namespace plumb::python

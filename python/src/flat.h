// Binds what an elementwise optimizer of the user's own steps: stretches of flat memory (optim/update.h, optim/neighbours.h).
#pragma once

#include "bind.h"

namespace plumb::python {

void bind_flat(py::module_& module, py::class_<EngineObject>& engine);

}  // namespace plumb::python

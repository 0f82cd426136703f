// The module plumb._C.
#include <torch/version.h>

#include "bind.h"

PYBIND11_MODULE(_C, module) {
  using namespace plumb::python;
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("version") = PLUMB_VERSION;
  bind_error(module);
  bind_world(module);
  bind_strategy(module);
  bind_optim(module);
  bind_unit(module);
  bind_engine(module);
  bind_nn(module);
  bind_shards(module);
  bind_saved(module);
  announce_backwards();
}

// Binds what a face needs that shows each rank's shards as the parameters (plumb.fully_shard).
#include <ATen/ATen.h>

#include "bind.h"
#include "grad/piece.h"
#include "unit/deferred.h"

namespace plumb::python {
void bind_shards(py::module_& module) {
  using namespace py::literals;
  module.def(
      "cut",
      [](WorldObject& world, const std::vector<at::Tensor>& parameters) {
        const World place = *world;
        py::gil_scoped_release released;
        deferred::cut(place, parameters);
      },
      "world"_a, "parameters"_a);
  module.def("keep_rows", &deferred::keep_rows, "parameter"_a, "mine"_a, "rank"_a, no_gil());
  module.def("around_backwards", &around_backwards, "begin"_a, "end"_a);
  // A piece's numbers, in the same memory, without the mark.
  module.def("unmarked", [](const at::Tensor& tensor) { return unmarked(tensor); }, "tensor"_a, no_gil());
}

}  // namespace plumb::python

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
  // Moves with every change in place of any of them.
  module.def(
      "versions",
      [](const std::vector<at::Tensor>& tensors) {
        int64_t total = 0;
        for (const at::Tensor& tensor : tensors) total += static_cast<int64_t>(tensor._version());
        return total;
      },
      "tensors"_a);
  // Of each parameter: the numbers of its gradient, or of this rank's piece of it, as one row in the same memory.
  module.def(
      "flat_gradients",
      [](const std::vector<at::Tensor>& parameters) {
        std::vector<std::optional<at::Tensor>> flat;
        for (const at::Tensor& parameter : parameters) {
          const at::Tensor& gradient = parameter.grad();
          flat.push_back(gradient.defined() ? std::optional(unmarked(gradient).view({-1})) : std::nullopt);
        }
        return flat;
      },
      "parameters"_a, no_gil());
}

}  // namespace plumb::python

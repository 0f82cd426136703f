// Binds plumb/strategy.h.
#include "plumb/strategy.h"

#include "bind.h"

namespace plumb::python {

void bind_strategy(py::module_& module) {
  using namespace py::literals;
  py::class_<Mesh>(module, "Mesh")
      .def(py::init([](int replicate, int shard) { return Mesh{replicate, shard}; }), py::kw_only(), "replicate"_a = 0,
           "shard"_a = 0)
      .def_readonly("replicate", &Mesh::replicate)
      .def_readonly("shard", &Mesh::shard)
      .def("__repr__", [](const Mesh& mesh) {
        return "Mesh(replicate=" + std::to_string(mesh.replicate) + ", shard=" + std::to_string(mesh.shard) + ")";
      });
  module.def(
      "strategies",
      [] {
        std::vector<std::string> names;
        for (const Strategy& row : strategies()) names.push_back(row.name);
        return names;
      },
      R"(The rows of the placement table.

    >>> import plumb
    >>> "zero3" in plumb.strategies()
    True
    )");
  // What of a parameter, its gradient and the optimizer's state each rank keeps a part of, in a world of this size.
  module.def(
      "sharded",
      [](const std::string& name, Mesh mesh, int size) {
        const Strategy& row = strategy(name);
        const bool cut = mesh_of(row, mesh, size).shard > 1;
        const auto is = [cut](Placement placement) { return cut && placement == Placement::sharded; };
        return std::tuple(is(row.parameter), is(row.gradient), is(row.state));
      },
      "strategy"_a, "mesh"_a, "size"_a);
}

}  // namespace plumb::python

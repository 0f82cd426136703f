// Binds plumb/world.h.
#include "plumb/world.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bind.h"
#include "grad/manifest.h"
#include "world/group.h"
#include "world/world_impl.h"

namespace plumb::python {
namespace {

using std::chrono::milliseconds;

WorldOptions options_of(const std::string& backend, const std::string& device, double timeout) {
  return {.backend = backend, .device = device, .timeout = milliseconds(static_cast<int64_t>(timeout * 1000))};
}

// torch's own bindings hold these by pointers of their own: they come as references, and get one count more.
c10::intrusive_ptr<c10d::Store> store_of(const py::object& store) {
  return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(&py::cast<c10d::Store&>(store));
}

using Object = std::unique_ptr<WorldObject>;

Object own(World world) { return std::make_unique<WorldObject>(std::make_unique<World>(std::move(world))); }

Object join(const std::string& backend, const std::string& device, double timeout) {
  py::gil_scoped_release released;
  return own(World::join(options_of(backend, device, timeout)));
}

Object meet(const py::object& store, int rank, int size, const std::string& backend, const std::string& device,
            double timeout) {
  const auto place = store_of(store);
  py::gil_scoped_release released;
  return own(World::join(place, rank, size, options_of(backend, device, timeout)));
}

Object adopt(const py::object& group, const py::object& store, const std::string& device, double timeout) {
  auto& processes = py::cast<c10d::ProcessGroup&>(group);
  const auto place = store.is_none() ? c10::intrusive_ptr<c10d::Store>() : store_of(store);
  py::gil_scoped_release released;
  const auto backend = processes.getBackend(c10::Device(device).type());
  return own(World::adopt(backend, place, options_of("", device, timeout)));
}

// `body(world)` by threads of this process, one per rank. What one throws is everybody's error.
void run_threads(int ranks, const py::function& body, double timeout) {
  settle_autograd();
  py::gil_scoped_release released;
  run_local(
      ranks,
      [&](World world) {
        py::gil_scoped_acquire acquired;
        try {
          body(own(std::move(world)));
        } catch (py::error_already_set& error) {
          throw Error(error.what());  // Python's error ends here, under the GIL
        }
      },
      options_of("", "cpu", timeout));
}

// What this rank cannot build is an Error on every rank that is building it.
void refuse(WorldObject& world, const std::string& why) {
  check_together(*world, std::make_exception_ptr(std::runtime_error(why)));
}

// The others learn of it here, whoever still holds a part of this world: what goes with the process says nothing.
void leave(WorldObject& world) {
  if (!world.ended()) {
    py::gil_scoped_release released;
    if (Watch* watch = (*world).impl().watch.get()) watch->leave();
  }
  world.end();
}

void fail(WorldObject& world, const std::string& why) {
  if (!world.ended()) report_failure(*world, Error((*world).rank(), why).what(), {});
}

}  // namespace

void bind_world(py::module_& module) {
  using namespace py::literals;
  module.def("settle_autograd", &settle_autograd);
  module.def("run_threads", &run_threads, "ranks"_a, "body"_a, "timeout"_a);
  py::class_<WorldObject>(module, "World")
      .def(py::init([] { return own(World()); }))
      .def_static("join", &join, py::kw_only(), "backend"_a = "", "device"_a = "cpu", "timeout"_a = 60.0)
      .def_static("meet", &meet, "store"_a, "rank"_a, "size"_a, py::kw_only(), "backend"_a = "", "device"_a = "cpu",
                  "timeout"_a = 60.0)
      .def_static("adopt", &adopt, "group"_a, "store"_a = py::none(), py::kw_only(), "device"_a = "cpu",
                  "timeout"_a = 60.0)
      .def_property_readonly("rank", [](WorldObject& self) { return (*self).rank(); })
      .def_property_readonly("size", [](WorldObject& self) { return (*self).size(); })
      .def_property_readonly("local_rank", [](WorldObject& self) { return (*self).local_rank(); })
      .def_property_readonly("backend", [](WorldObject& self) { return (*self).backend(); })
      .def_property_readonly("timeout", [](WorldObject& self) { return (*self).timeout().count() / 1000.0; })
      .def(
          "barrier", [](WorldObject& self) { (*self).barrier(); }, no_gil())
      .def("refuse", &refuse, "why"_a, no_gil())
      .def("fail", &fail, "why"_a, no_gil())
      .def("leave", &leave)
      .def("__repr__", [](WorldObject& self) {
        if (self.ended()) return std::string("<plumb.World, left>");
        const World& world = *self;
        return "<plumb.World rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size()) + " over " +
               world.backend() + ">";
      });
}

}  // namespace plumb::python

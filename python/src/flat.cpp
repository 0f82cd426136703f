#include "flat.h"

#include "engine/impl.h"
#include "optim/neighbours.h"

namespace plumb::python {
namespace {

using Gradients = std::pair<int64_t, std::vector<at::Tensor>>;
using Member = std::tuple<at::Tensor, int64_t, int64_t, int64_t>;

// The number of the stretches, and the gradient of each.
Gradients gradients_of(const Stretches& stretches) {
  std::vector<at::Tensor> gradients;
  for (const Stretch& stretch : stretches.all) gradients.push_back(stretch.gradient);
  return {stretches.number, std::move(gradients)};
}

std::vector<std::pair<at::Tensor, std::vector<Member>>> told(const Stretches& stretches) {
  std::vector<std::pair<at::Tensor, std::vector<Member>>> all;
  for (const Stretch& stretch : stretches.all) {
    all.emplace_back(stretch.weight, std::vector<Member>());
    for (const Stretch::Member& one : stretch.members)
      all.back().second.emplace_back(one.parameter, one.begin, one.offset, one.numel);
  }
  return all;
}

// Inside of a step.
Gradients flat_gradients(EngineObject& self) {
  Engine::Impl& impl = (*self).impl();
  if (!impl.in_step) throw Error(impl.world.rank(), "stretches outside of a step; call begin_step() first");
  return gradients_of(impl.updater->lend_flat(impl.reducer->buckets()));
}

// Of an engine without an optimizer, after its step.
class NeighboursObject {
 public:
  explicit NeighboursObject(EngineObject& engine) : engine_(engine) {}
  Gradients flat_gradients() {
    Gradients gradients = gradients_of(neighbours_.lend((*engine_).impl().reducer->buckets()));
    neighbours_.take_back();
    return gradients;
  }
  std::vector<std::pair<at::Tensor, std::vector<Member>>> stretches() const { return told(neighbours_.stretches()); }

 private:
  EngineObject& engine_;
  Neighbours neighbours_;
};

}  // namespace

void bind_flat(py::module_& module, py::class_<EngineObject>& engine) {
  engine.def("flat_gradients", &flat_gradients, no_gil())
      .def("stretches", [](EngineObject& self) { return told((*self).impl().updater->stretches()); }, no_gil());
  py::class_<NeighboursObject>(module, "Neighbours")
      .def(py::init<EngineObject&>(), py::arg("engine"), py::keep_alive<1, 2>())
      .def("flat_gradients", &NeighboursObject::flat_gradients, no_gil())
      .def("stretches", &NeighboursObject::stretches, no_gil());
}

}  // namespace plumb::python

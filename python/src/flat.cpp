#include "flat.h"

#include "engine/impl.h"

namespace plumb::python {
namespace {

// Inside of a step: the number of the stretches, and the gradient of each.
std::pair<int64_t, std::vector<at::Tensor>> flat_gradients(EngineObject& self) {
  Engine::Impl& impl = (*self).impl();
  if (!impl.in_step) throw Error(impl.world.rank(), "stretches outside of a step; call begin_step() first");
  const Updater::Stretches& stretches = impl.updater->lend_flat(impl.reducer->buckets());
  std::vector<at::Tensor> gradients;
  for (const Updater::Stretch& stretch : stretches.all) gradients.push_back(stretch.gradient);
  return {stretches.number, std::move(gradients)};
}

using Member = std::tuple<at::Tensor, int64_t, int64_t, int64_t>;

// Those of the last call of flat_gradients().
std::vector<std::pair<at::Tensor, std::vector<Member>>> stretches(EngineObject& self) {
  std::vector<std::pair<at::Tensor, std::vector<Member>>> all;
  for (const Updater::Stretch& stretch : (*self).impl().updater->stretches().all) {
    all.emplace_back(stretch.weight, std::vector<Member>());
    for (const Updater::Member& one : stretch.members)
      all.back().second.emplace_back(one.parameter, one.begin, one.offset, one.numel);
  }
  return all;
}

}  // namespace

void bind_flat(py::class_<EngineObject>& engine) {
  engine.def("flat_gradients", &flat_gradients, no_gil()).def("stretches", &stretches, no_gil());
}

}  // namespace plumb::python

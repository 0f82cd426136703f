// Entrance 3: gradients that a compiled or hand-written backward hands over, as a call and as an operator.
#include <torch/library.h>

#include "engine/impl.h"
#include "engine/owners.h"
#include "grad/mode.h"

namespace plumb {

void Engine::deliver(const at::Tensor& parameter, const at::Tensor& raw_gradient) {
  const TrainingMode training;
  impl_->reducer->deliver(parameter, raw_gradient);
}

void Engine::end_pass() {
  const TrainingMode training;
  impl_->reducer->end_pass();
}

namespace {

Engine::Impl& owner_of(const at::Tensor& parameter, at::Tensor* own) {
  Engine::Impl* owner = Owners::all().of(parameter, own);
  if (owner == nullptr) throw Error("plumb::deliver of a gradient for a tensor that is no parameter of any engine");
  return *owner;
}

void deliver(at::Tensor parameter, const at::Tensor& gradient) {  // NOLINT(performance-unnecessary-value-param)
  const TrainingMode training;
  at::Tensor own;
  owner_of(parameter, &own).reducer->deliver(own, gradient);
}

void end_pass(at::Tensor parameter) {  // NOLINT(performance-unnecessary-value-param)
  const TrainingMode training;
  at::Tensor own;
  owner_of(parameter, &own).reducer->end_pass();
}

// While a graph is traced, nothing is delivered.
void deliver_meta(at::Tensor, const at::Tensor&) {}  // NOLINT(performance-unnecessary-value-param)
void end_pass_meta(at::Tensor) {}                    // NOLINT(performance-unnecessary-value-param)

}  // namespace

// The parameter counts as changed, so that no compiler drops or reorders the calls.
TORCH_LIBRARY(plumb, library) {
  library.def("deliver(Tensor(a!) parameter, Tensor gradient) -> ()");
  library.def("end_pass(Tensor(a!) parameter) -> ()");
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, library) {
  library.impl("deliver", &deliver);
  library.impl("end_pass", &end_pass);
}
TORCH_LIBRARY_IMPL(plumb, Meta, library) {
  library.impl("deliver", &deliver_meta);
  library.impl("end_pass", &end_pass_meta);
}

}  // namespace plumb

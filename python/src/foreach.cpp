// Counts what torch._foreach_* writes into DTensors: torch moves the versions of plain tensors, and those of DTensors never.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>
#include <vector>

namespace plumb::python {
namespace {

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// What a plain operation in place does here. What is below runs as if nobody stood here: it counts plain tensors itself.
void count(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    if (!writes(arguments[i]) || !value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_python_dispatch() && !tensor.is_inference())
        written.push_back(tensor);
    }
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

bool is_foreach_in_place(const c10::OperatorName& name) {
  if (!std::string_view(name.name).starts_with("aten::_foreach_")) return false;
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) return false;
  // Those that answer into tensors that are given (out=) count by themselves what they write.
  return op->schema().returns().empty() && writes(op->schema().arguments()[0]);
}

}  // namespace

// At load time: a table that every operation of every thread reads is not written later.
TORCH_LIBRARY_IMPL(aten, ADInplaceOrView, library) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!is_foreach_in_place(name)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&count>());
  }
}

}  // namespace plumb::python

// Kernels of the simulated device that are not the CPU's, and the registration of all of them.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "sim/allocator.h"
#include "sim/machine.h"
#include "sim/memory.h"
#include "sim/ops.h"

namespace plumb::sim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::jit::Stack;

Tensor empty_memory_format(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
  const int before = place().device;
  if (device && device->index() >= 0) place().device = device->index();
  auto tensor = at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
  place().device = before;
  return tensor;
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_on(device && device->index() >= 0 ? device->index() : place().device, sizes, strides,
                  dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

void record_stream_kernel(Tensor& tensor, c10::Stream stream) { record_stream(tensor.storage().data_ptr(), stream); }

bool always(const Tensor&, const Tensor&) { return true; }

// ATen sends convolutions of unknown devices here; the CPU's own convolution is the one to run.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Stack stack;
  torch::jit::push(stack, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  boxed_kernel(operation, &stack);
  return stack[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  Stack stack;
  torch::jit::push(stack, grad, input, weight, std::optional<IntArrayRef>(bias_sizes), stride, padding, dilation,
                   transposed, output_padding, groups, c10::List<bool>({mask[0], mask[1], mask[2]}));
  boxed_kernel(operation, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// The attention kernel that the CPU would choose; its name ends in _for_cpu, and the boxed road takes it.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  std::optional<Tensor> mask_alias;
  if (mask && mask->defined()) mask_alias = cpu_alias(*mask);
  return at::_fused_sdp_choice(cpu_alias(query), cpu_alias(key), cpu_alias(value), mask_alias, dropout, causal, scale,
                               grouped);
}

// Operations that have both a kernel for the CPU and one composed of others would run the composed one here, with other
// bits than the CPU's.
void redirect_composites(torch::Library& library) {
  using Key = c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto operation = dispatcher.findSchema(name);
    if (!operation || !operation->hasKernelForDispatchKey(Key::CPU)) continue;
    if (operation->hasKernelForDispatchKey(Key::PrivateUse1)) continue;
    const bool composite = operation->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
                           (operation->hasKernelForDispatchKey(Key::CompositeImplicitAutograd) &&
                            operation->hasKernelForDispatchKey(Key::Autograd));
    if (!composite || facts_of(*operation).is_view) continue;
    library.impl(facts_of(*operation).name.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
  }
}

}  // namespace

void register_kernels() {
  using torch::Library;
  static Library any(Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  any.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
  static Library aten(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten.impl("empty.memory_format", &empty_memory_format);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("resize_", &resize_tensor);
  aten.impl("_copy_from", &copy_from);
  aten.impl("record_stream", &record_stream_kernel);
  aten.impl("_has_compatible_shallow_copy_type", &always);  // Module::to keeps its parameters
  aten.impl("as_strided", &at::native::as_strided_tensorimpl);
  aten.impl("view", TORCH_FN(static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view)));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("view.dtype", TORCH_FN(at::native::view_dtype));
  aten.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  aten.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_", TORCH_FN(at::native::set_cpu_));
  aten.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_)));
  aten.impl("convolution_overrideable", &convolution);
  aten.impl("convolution_backward_overrideable", &convolution_backward);
  redirect_composites(aten);
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
  // Aliases carry the conjugate and negative bits; resolving them here would copy, which asks to resolve them, for ever.
  static Library conjugate(Library::IMPL, "aten", c10::DispatchKey::Conjugate, __FILE__, __LINE__);
  conjugate.impl("_copy_from", torch::CppFunction::makeFallthrough());
  static Library negative(Library::IMPL, "aten", c10::DispatchKey::Negative, __FILE__, __LINE__);
  negative.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace plumb::sim

// The boxed road of an operation: its CPU kernel, in a task, over CPU tensors that alias the device's memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "sim/labels.h"

namespace plumb::sim {

// What a schema says, read once.
struct OperationFacts {
  std::string name;  // "add.out"
  Label label = 0;
  size_t arguments = 0, returns = 0;
  std::vector<bool> written;           // per argument
  std::vector<bool> output;            // per argument: an out= argument
  std::vector<int> returned_argument;  // per return: the argument it is, or -1 for a new tensor
  std::vector<bool> returns_list;      // per return
  bool makes_tensors = false;          // some return is a new tensor
  bool returns_value = false;          // some return is no tensor
  bool random = false;
  bool shape_depends_on_data = false;
  bool random_depends_on_data = false;  // how many random numbers it draws depends on its input
  bool is_view = false;                 // returns a view: needs a kernel of its own
  // The CPU kernel resizes its out= as scratch: it gets a temporary. Found out at the first failure.
  bool scratches_output = false;
};
OperationFacts& facts_of(const c10::OperatorHandle& operation);

// Sizes, strides and dtypes of the tensors an operation returns, in order.
struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};
struct Shapes {
  std::vector<Shape> tensors;
  std::vector<size_t> counts;  // tensors per return
};
// From a run of the CPU kernel on zeros, remembered by the arguments' metadata. Empty when the kernel cannot be run on
// zeros. A random operation runs every time, which moves its generator on as the real run would.
std::optional<Shapes> shapes_of(const c10::OperatorHandle& operation, const OperationFacts& facts,
                                const torch::jit::Stack& arguments);

// Calls `f` for every defined tensor in a value; a copy of the value with each replaced by f's result, and with any
// device replaced by the CPU.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f);
void for_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f);
void call_cpu(const c10::OperatorHandle& operation, torch::jit::Stack& stack);

// The kernel of every operation that has no other.
void boxed_kernel(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

// Registers all kernels; called once.
void register_kernels();

// How operations went so far: name to route ("queued" or "synchronised"). For the coverage table.
std::map<std::string, std::string> routes_taken();

}  // namespace plumb::sim

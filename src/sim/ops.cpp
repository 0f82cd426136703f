// The boxed kernel: enqueue the CPU's kernel over aliases of device memory.
#include "sim/ops.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <unordered_map>

#include "sim/machine.h"
#include "sim/memory.h"

namespace plumb::sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::map<std::string, std::string>& routes() {
  static auto* const routes = new std::map<std::string, std::string>;
  return *routes;
}

int device_of_call(const OperationFacts& facts, const Stack& arguments) {
  int device = -1;
  for (const IValue& value : arguments) {
    if (value.isDevice() && device < 0 && value.toDevice().type() == device_type) device = value.toDevice().index();
    for_tensors(value, [&](const at::Tensor& tensor) {
      if (!on_sim(tensor)) return;
      TORCH_CHECK(device < 0 || device == tensor.device().index(), facts.name,
                  ": expected all tensors on one device, found sim:", device, " and ", tensor.device());
      device = tensor.device().index();
    });
  }
  return device < 0 ? place().device : device;
}

// Boolean and byte index tensors make the result's shape depend on data.
bool indexes_by_mask(const Stack& arguments) {
  for (const IValue& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const auto& index : value.toOptionalTensorVector()) {
      if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
        return true;
      }
    }
  }
  return false;
}

// Random numbers are drawn when the kernel runs, from the state the generator had at the call.
class Draw {
 public:
  Draw(const OperationFacts& facts, const Stack& arguments) {
    if (!facts.random || facts.random_depends_on_data) return;
    generator_ = at::detail::getDefaultCPUGenerator();
    for (const IValue& value : arguments) {
      if (value.isGenerator()) generator_ = value.toGenerator();
    }
    state_ = generator_.get_state();
  }
  void run(const c10::OperatorHandle& operation, Stack& stack) const {
    if (!state_.defined()) return call_cpu(operation, stack);
    at::Generator generator = generator_;
    const at::Tensor later = generator.get_state();
    generator.set_state(state_);
    try {
      call_cpu(operation, stack);
    } catch (...) {
      generator.set_state(later);
      throw;
    }
    generator.set_state(later);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

struct Output {
  size_t argument;
  at::Tensor alias;
  std::vector<int64_t> sizes, strides;
};

struct Call {
  c10::OperatorHandle operation;
  OperationFacts* facts;
  Draw draw;
  Stack arguments;                  // over CPU aliases
  std::vector<Output> outputs;      // out= arguments that are nothing else
  std::vector<at::Tensor> results;  // aliases of the new tensors, undefined for the others
};

// Kernels that use out= as scratch warn of it; the user did nothing to be warned of.
class NoResizeWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().rfind("An output with one or more elements was resized", 0) != 0) before_->process(warning);
  }

 private:
  c10::WarningHandler* before_ = c10::WarningUtils::get_warning_handler();
};

// Some CPU kernels resize their out= as scratch, which an alias refuses: those get a temporary from then on.
void run_with_outputs(const Call& call, Stack& stack) {
  const Stack arguments = call.outputs.empty() ? Stack() : stack;
  NoResizeWarnings quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  if (!call.facts->scratches_output) {
    try {
      call.draw.run(call.operation, stack);
      const bool kept = std::all_of(call.outputs.begin(), call.outputs.end(), [](const Output& output) {
        return output.alias.sizes() == at::IntArrayRef(output.sizes);
      });
      if (kept) return;
    } catch (const std::exception&) {
      if (call.outputs.empty()) throw;
    }
    stack = arguments;
    for (const Output& output : call.outputs) {
      output.alias.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides);
    }
  }
  std::vector<at::Tensor> temporaries;
  for (const Output& output : call.outputs) {
    temporaries.push_back(output.sizes.empty()
                              ? at::empty({0}, output.alias.options())
                              : at::empty_strided(output.sizes, output.strides, output.alias.options()));
    stack[output.argument] = temporaries.back();
  }
  call.draw.run(call.operation, stack);
  call.facts->scratches_output = true;
  for (size_t i = 0; i < temporaries.size(); ++i) {
    const at::Tensor& alias = call.outputs[i].alias;
    TORCH_CHECK(temporaries[i].sizes() == alias.sizes(), "out= has sizes ", alias.sizes(), "; the result has ",
                temporaries[i].sizes());
    copy_values(alias, temporaries[i]);
  }
}

void run(Call& call) {
  Stack stack = std::move(call.arguments);
  run_with_outputs(call, stack);
  if (call.results.empty()) return;
  size_t i = 0;
  const auto store = [&](const at::Tensor& result) {
    const at::Tensor& alias = call.results.at(i++);
    if (alias.defined()) copy_values(alias, result);
  };
  for (const IValue& value : stack) {
    if (value.isTensor()) {
      store(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) store(tensor);
    }
  }
}

// out= arguments that came empty get the result's size, as every torch kernel does.
void size_outputs(const OperationFacts& facts, const Shapes& shapes, const Stack& arguments) {
  size_t first = 0;
  for (size_t r = 0; r < facts.returns; first += shapes.counts[r], ++r) {
    const int index = facts.returned_argument[r];
    if (index < 0 || !arguments[index].isTensor()) continue;
    const at::Tensor& tensor = arguments[index].toTensor();
    if (tensor.sizes() != at::IntArrayRef(shapes.tensors[first].sizes)) {
      resize_tensor(tensor, shapes.tensors[first].sizes, std::nullopt);
    }
  }
}

at::Tensor keep_number(const at::Tensor& cpu) {
  auto copy = cpu.clone();
  if (cpu.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

}  // namespace

void boxed_kernel(const c10::OperatorHandle& operation, Stack* stack) {
  OperationFacts& facts = facts_of(operation);
  TORCH_CHECK(!facts.is_view, "the simulated accelerator has no kernel for the view ", facts.name);
  Stack arguments(std::make_move_iterator(stack->end() - static_cast<int64_t>(facts.arguments)),
                  std::make_move_iterator(stack->end()));
  stack->resize(stack->size() - facts.arguments);
  const int device = device_of_call(facts, arguments);

  bool empty_output = false;
  for (size_t i = 0; i < facts.arguments; ++i) {
    if (!facts.output[i]) continue;
    for_tensors(arguments[i], [&](const at::Tensor& tensor) { empty_output |= tensor.numel() == 0; });
  }
  bool synchronise = facts.returns_value || facts.random_depends_on_data ||
                     (facts.makes_tensors && (facts.shape_depends_on_data || indexes_by_mask(arguments)));
  Call call{operation, &facts, Draw(facts, arguments), {}, {}, {}};
  std::optional<Shapes> shapes;
  if (!synchronise && (facts.random || empty_output || facts.makes_tensors)) {
    shapes = shapes_of(operation, facts, arguments);
    if (!shapes) {
      synchronise = true;
    } else if (empty_output) {
      size_outputs(facts, *shapes, arguments);
    }
  }

  std::vector<Range> ranges;
  std::vector<std::pair<const void*, at::Tensor>> aliases;  // one per TensorImpl: kernels ask is_same
  call.arguments.reserve(facts.arguments);
  for (size_t i = 0; i < facts.arguments; ++i) {
    call.arguments.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!on_sim(tensor)) return keep_number(tensor);
      add_ranges(ranges, tensor, facts.written[i]);
      const void* impl = tensor.unsafeGetTensorImpl();
      const auto known = std::find_if(aliases.begin(), aliases.end(), [&](auto& pair) { return pair.first == impl; });
      if (known != aliases.end()) return known->second;
      aliases.emplace_back(impl, cpu_alias(tensor));
      if (facts.output[i] && arguments[i].isTensor()) {
        call.outputs.push_back({i, aliases.back().second, tensor.sizes().vec(), tensor.strides().vec()});
      }
      return aliases.back().second;
    }));
  }

  if (synchronise) {
    auto results = std::make_shared<Stack>();
    {
      auto lock = Machine::lock();
      routes()[facts.name] = "synchronised";
      const int stream = current_id(device);
      Machine::get().enqueue(stream, facts.label, ranges, [call = std::move(call), results]() mutable {
        *results = std::move(call.arguments);
        call.draw.run(call.operation, *results);
      });
      Machine::get().synchronize(stream, lock);
    }
    for (size_t r = 0; r < facts.returns; ++r) {
      if (facts.returned_argument[r] >= 0) {
        stack->push_back(arguments[facts.returned_argument[r]]);
        continue;
      }
      stack->push_back(map_tensors(results->at(r), [&](const at::Tensor& tensor) {
        auto result = empty_on(device, tensor.sizes(), tensor.strides(), tensor.scalar_type());
        copy_from(tensor, result, false);
        return result;
      }));
    }
    return;
  }

  size_t next = 0;
  for (size_t r = 0; r < facts.returns; ++r) {
    const size_t count = shapes ? shapes->counts[r] : 0;
    if (facts.returned_argument[r] >= 0) {
      stack->push_back(arguments[facts.returned_argument[r]]);
      next += count;
      if (facts.makes_tensors) call.results.resize(next);
      continue;
    }
    c10::List<at::Tensor> tensors;
    for (size_t k = 0; k < count; ++k, ++next) {
      const Shape& shape = shapes->tensors[next];
      at::Tensor result = shape.defined ? empty_on(device, shape.sizes, shape.strides, shape.dtype) : at::Tensor();
      add_ranges(ranges, result, true);
      call.results.push_back(shape.defined ? cpu_alias(result) : at::Tensor());
      tensors.push_back(result);
    }
    if (facts.returns_list[r]) {
      stack->push_back(tensors);
    } else {
      stack->push_back(tensors.get(0));
    }
  }
  const auto lock = Machine::lock();
  routes().try_emplace(facts.name, "queued");
  // Shared, since a std::function must be copyable and a copied call would copy its stack.
  Machine::get().enqueue(current_id(device), facts.label, ranges,
                         [call = std::make_shared<Call>(std::move(call))] { run(*call); });
}

std::map<std::string, std::string> routes_taken() {
  const auto lock = Machine::lock();
  return routes();
}

}  // namespace plumb::sim

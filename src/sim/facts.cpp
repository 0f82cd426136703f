// What a schema says about an operation, and the shapes it will return.
#include <ATen/ATen.h>

#include <set>
#include <sstream>
#include <unordered_map>

#include "sim/machine.h"
#include "sim/ops.h"

namespace plumb::sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

OperationFacts read_facts(const c10::OperatorHandle& operation) {
  const auto& schema = operation.schema();
  OperationFacts facts;
  facts.name = schema.name().substr(schema.name().find("::") + 2);
  if (!schema.overload_name().empty()) facts.name += "." + schema.overload_name();
  facts.label = intern(facts.name);
  facts.arguments = schema.arguments().size();
  facts.returns = schema.returns().size();
  for (const auto& argument : schema.arguments()) {
    facts.written.push_back(writes(argument));
    facts.output.push_back(argument.is_out());
  }
  for (const auto& returned : schema.returns()) {
    const auto kind = returned.type()->kind();
    const bool list = kind == c10::TypeKind::ListType;
    facts.returns_list.push_back(list);
    facts.returned_argument.push_back(-1);
    if (kind != c10::TypeKind::TensorType && !list) {
      facts.returns_value = true;
    } else if (!returned.alias_info()) {
      facts.makes_tensors = true;
    } else if (!returned.alias_info()->isWrite()) {
      facts.is_view = true;
    } else {
      for (size_t i = 0; i < facts.arguments; ++i) {
        if (facts.written[i] && *schema.arguments()[i].alias_info() == *returned.alias_info()) {
          facts.returned_argument.back() = static_cast<int>(i);
        }
      }
    }
  }
  facts.random = operation.hasTag(at::Tag::nondeterministic_seeded);
  facts.shape_depends_on_data = operation.hasTag(at::Tag::dynamic_output_shape) ||
                                operation.hasTag(at::Tag::data_dependent_output) ||
                                facts.name == "_unique";  // has no tag before torch 2.13
  // Of these only the mask forms are dynamic; shapes_of looks at the arguments.
  if (facts.name == "index.Tensor" || facts.name == "repeat_interleave.self_int") facts.shape_depends_on_data = false;
  static const std::set<std::string> rejecting = {"poisson",  "_standard_gamma", "_sample_dirichlet",
                                                  "binomial", "multinomial",     "geometric_"};
  facts.random_depends_on_data = facts.random && rejecting.count(facts.name.substr(0, facts.name.find('.')));
  return facts;
}

class Key {
 public:
  void add(const void* bytes, size_t size) { text_.append(static_cast<const char*>(bytes), size); }
  template <class T>
  void add(const T& value) {
    add(static_cast<const void*>(&value), sizeof(T));
  }
  void add(at::IntArrayRef values) {
    add(values.size());
    add(values.data(), values.size() * sizeof(int64_t));
  }
  void add(const IValue& value) {
    add(value.isTensor() ? 1 : value.isInt() ? 2 : value.isDouble() ? 3 : value.isBool() ? 4 : 5);
    if (value.isInt()) return add(value.toInt());
    if (value.isDouble()) return add(value.toDouble());
    if (value.isBool()) return add(value.toBool());
    if (value.isNone() || value.isGenerator()) return;
    if (value.isIntList()) return add(at::IntArrayRef(value.toIntVector()));
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      for_tensors(value, [&](const at::Tensor& tensor) {
        add(tensor.sizes());
        add(tensor.strides());
        add(tensor.scalar_type());
        add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      });
      return;
    }
    std::ostringstream out;
    out << value;
    const std::string text = out.str();
    add(text.size());
    add(text.data(), text.size());
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

Stack run_on_zeros(const c10::OperatorHandle& operation, const Stack& arguments) {
  Stack stack;
  for (const IValue& value : arguments) {
    stack.push_back(map_tensors(value, [](const at::Tensor& tensor) {
      auto zeros = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) zeros.unsafeGetTensorImpl()->set_wrapped_number(true);
      return zeros;
    }));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_grad;
  call_cpu(operation, stack);
  return stack;
}

Shapes read_shapes(const Stack& results) {
  Shapes shapes;
  for (const IValue& value : results) {
    const size_t before = shapes.tensors.size();
    if (value.isTensor() && !value.toTensor().defined()) shapes.tensors.emplace_back();
    for_tensors(value, [&](const at::Tensor& tensor) {
      shapes.tensors.push_back({true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
    });
    shapes.counts.push_back(shapes.tensors.size() - before);
  }
  return shapes;
}

}  // namespace

OperationFacts& facts_of(const c10::OperatorHandle& operation) {
  static auto& all = *new std::unordered_map<const void*, OperationFacts>;
  const auto lock = Machine::lock();
  const auto [it, fresh] = all.try_emplace(&operation.schema());
  if (fresh) it->second = read_facts(operation);
  return it->second;
}

IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? f(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(f(*tensor)) : tensor);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  return value;
}

void for_tensors(const IValue& value, const std::function<void(const at::Tensor&)>& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) f(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined()) f(*tensor);
    }
  }
}

void call_cpu(const c10::OperatorHandle& operation, Stack& stack) {
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

std::optional<Shapes> shapes_of(const c10::OperatorHandle& operation, const OperationFacts& facts,
                                const Stack& arguments) {
  if (facts.random) return read_shapes(run_on_zeros(operation, arguments));
  Key key;
  key.add(&facts);
  for (const IValue& value : arguments) key.add(value);
  const std::string text = key.take();
  static auto& known = *new std::unordered_map<std::string, Shapes>;
  {
    const auto lock = Machine::lock();
    if (const auto it = known.find(text); it != known.end()) return it->second;
  }
  Shapes shapes;
  try {
    shapes = read_shapes(run_on_zeros(operation, arguments));
  } catch (const std::exception&) {
    if (!facts.makes_tensors) throw;
    return std::nullopt;
  }
  const auto lock = Machine::lock();
  return known.emplace(text, std::move(shapes)).first->second;
}

}  // namespace plumb::sim

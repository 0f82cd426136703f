// Binds plumb/nn.h as functions over the weights of Python's modules, and plumb/fused.h as the attributes of a weight that
// TransformerEngine and Megatron agree by.
#include "plumb/nn.h"

#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bind.h"
#include "lane/lane.h"
#include "nn/ops.h"

namespace plumb::python {
namespace {

using namespace py::literals;
using Store = std::shared_ptr<nn::WgradStore>;
using Tensors = std::vector<at::Tensor>;

// The owner of a weight's main_grad, as the weight's attributes tell: main_grad, overwrite_main_grad,
// grad_added_to_main_grad. They are read when a backward needs them.
class AttributeSink final : public FusedSink {
 public:
  AttributeSink(const at::Tensor& weight, std::string name)
      : weight_(weight.getIntrusivePtr()), name_(std::move(name)) {}

  std::string name() const override { return name_; }

  GradTarget open() override {
    const py::gil_scoped_acquire gil;
    const py::object weight = object();
    const py::object main_grad = py::getattr(weight, "main_grad", py::none());
    if (!THPVariable_Check(main_grad.ptr())) {
      throw Error("main_grad of '" + name_ + "' is no tensor; expected a buffer for the weight's gradient");
    }
    buffer_ = THPVariable_Unpack(main_grad.ptr());
    lanes_.begin_all(buffer_.device());
    const py::object overwrite = py::getattr(weight, "overwrite_main_grad", py::none());
    return {buffer_, !(overwrite.ptr() == Py_True)};
  }
  void wrote() override { lanes_.end_all(buffer_.device()); }

  Tell tell() const override {
    const py::gil_scoped_acquire gil;
    return py::hasattr(object(), "grad_added_to_main_grad") ? Tell::by_stand_in : Tell::nothing;
  }
  void stood_in() override {
    const py::gil_scoped_acquire gil;
    py::setattr(object(), "grad_added_to_main_grad", py::bool_(true));
  }

 private:
  py::object object() const {
    auto weight = weight_.lock();
    if (!weight) throw Error("the weight '" + name_ + "' is gone, and a gradient comes for it");
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(at::Tensor(std::move(weight))));
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight_;
  std::string name_;
  at::Tensor buffer_;
  Lanes lanes_;
};

// Whoever owns the weight's gradient already (an engine) keeps it; then there is nothing to hold.
std::shared_ptr<FusedSink> follow_attributes(const at::Tensor& weight, const std::string& name) {
  if (sink_of(weight)) return nullptr;
  auto sink = std::make_shared<AttributeSink>(weight, name);
  attach(weight, sink);
  return sink;
}

nn::Tokens tokens_of(const at::Tensor& counts, bool are_ends) { return {counts, are_ends}; }

nn::Activation activation_of(const std::string& name) {
  if (name == "swiglu") return nn::Activation::swiglu;
  if (name == "gelu") return nn::Activation::gelu;
  throw Error("the activation is '" + name + "'; expected swiglu or gelu");
}

nn::Routing routing_of(const at::Tensor& weights, const at::Tensor& order) { return {weights, order, {}}; }

}  // namespace

void bind_nn(py::module_& module) {
  py::class_<FusedSink, std::shared_ptr<FusedSink>>(module, "FusedSink");
  py::class_<nn::WgradStore, Store>(module, "WgradStore")
      .def(py::init<>())
      .def("flush", &nn::WgradStore::flush, no_gil());
  module.def("follow_attributes", &follow_attributes, "weight"_a, "name"_a);
  module.def(
      "linear",
      [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const Store& store) {
        return nn::linear(x, weight, bias, store);
      },
      "x"_a, "weight"_a, "bias"_a, "store"_a, no_gil());
  module.def(
      "grouped_linear",
      [](const at::Tensor& x, const Tensors& weights, const Tensors& biases, const at::Tensor& counts, bool are_ends,
         int64_t experts, const Store& store) {
        return nn::grouped_linear(x, {weights, biases}, tokens_of(counts, are_ends), experts, store);
      },
      "x"_a, "weights"_a, "biases"_a, "counts"_a, "are_ends"_a, "experts"_a, "store"_a, no_gil());
  module.def(
      "grouped_mlp",
      [](const at::Tensor& x, const Tensors& up, const Tensors& up_biases, const Tensors& down,
         const Tensors& down_biases, const std::optional<at::Tensor>& probabilities, const std::string& activation,
         const at::Tensor& counts, bool are_ends, int64_t experts, const Store& store) {
        return nn::grouped_mlp(x, {up, up_biases}, {down, down_biases}, probabilities.value_or(at::Tensor()),
                               activation_of(activation), tokens_of(counts, are_ends), experts, store);
      },
      "x"_a, "up"_a, "up_biases"_a, "down"_a, "down_biases"_a, "probabilities"_a, "activation"_a, "counts"_a,
      "are_ends"_a, "experts"_a, "store"_a, no_gil());
  module.def(
      "route",
      [](const at::Tensor& x, const at::Tensor& weight, int64_t top_k) {
        const nn::Routing routing = nn::route(x, weight, top_k);
        return std::tuple(routing.weights, routing.order, routing.sizes);
      },
      "x"_a, "weight"_a, "top_k"_a, no_gil());
  module.def(
      "permute",
      [](const at::Tensor& x, const at::Tensor& weights, const at::Tensor& order) {
        return nn::permute(x, routing_of(weights, order));
      },
      "x"_a, "weights"_a, "order"_a, no_gil());
  module.def(
      "permuted_weights",
      [](const at::Tensor& weights, const at::Tensor& order) {
        return nn::permuted_weights(routing_of(weights, order));
      },
      "weights"_a, "order"_a, no_gil());
  module.def(
      "unpermute",
      [](const at::Tensor& y, const at::Tensor& weights, const at::Tensor& order, bool weighted) {
        return nn::unpermute(y, routing_of(weights, order), weighted ? nn::Weigh::activations : nn::Weigh::results);
      },
      "y"_a, "weights"_a, "order"_a, "weighted"_a, no_gil());
}

}  // namespace plumb::python

#include "cli/origin.h"

#include <ATen/ATen.h>

#include <array>
#include <memory>
#include <string_view>

namespace plumb::cli {

namespace {

OriginWatch::Numbers operator|(OriginWatch::Numbers a, OriginWatch::Numbers b) {
  return {a.nan || b.nan, a.inf || b.inf};
}

// Memory may be somebody's that gave it back: a released unit's.
bool readable(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 || !tensor.is_floating_point()) return false;
  if (tensor.layout() != at::kStrided || tensor.is_meta()) return false;
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<int64_t>(tensor.storage().nbytes()) >= (last + 1) * tensor.element_size();
}

OriginWatch::Numbers numbers_in(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!readable(tensor)) return {};
    const at::Tensor plain = tensor.detach();
    return {plain.isnan().any().item<bool>(), plain.isinf().any().item<bool>()};
  }
  OriginWatch::Numbers all;
  if (value.isTensorList()) {
    for (const at::Tensor& one : value.toTensorVector()) all = all | numbers_in(one);
  }
  return all;
}

// What hands out memory as it lies there, or a number that somebody wrote.
bool makes_nothing(std::string_view name, bool inf) {
  if (name.find("empty") != name.npos || name.find("resize") != name.npos || name == "aten::set_") return true;
  constexpr std::array fills = {"full", "fill", "where", "scalar_tensor", "item", "triu", "tril"};
  for (const char* one : fills) {
    if (inf && name.find(one) != name.npos) return true;
  }
  return false;
}

}  // namespace

struct OriginWatch::Inputs : at::ObserverContext {
  Numbers numbers;
  std::string shapes;
};

namespace {
thread_local OriginWatch* watching = nullptr;  // callbacks are functions
}  // namespace

OriginWatch::OriginWatch() {
  watching = this;
  handle_ =
      at::addThreadLocalCallback(at::RecordFunctionCallback(
                                     [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
                                       auto inputs = std::make_unique<Inputs>();
                                       if (watching != nullptr) begin(*watching, function, *inputs);
                                       return inputs;
                                     },
                                     [](const at::RecordFunction& function, at::ObserverContext* context) {
                                       if (watching != nullptr)
                                         end(*watching, function, *static_cast<Inputs*>(context));
                                     })
                                     .needsInputs(true)
                                     .needsOutputs(true)
                                     .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

OriginWatch::~OriginWatch() {
  at::removeCallback(handle_);
  watching = nullptr;
}

void OriginWatch::begin(OriginWatch& watch, const at::RecordFunction& function, Inputs& inputs) {
  const at::DisableRecordFunctionGuard quiet;
  const at::NoGradGuard no_grad;
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    watch.node_ = function.name();
    return;
  }
  ++watch.operations_;
  for (const c10::IValue& input : function.inputs()) {
    inputs.numbers = inputs.numbers | numbers_in(input);
    if (!input.isTensor() || !input.toTensor().defined()) continue;
    inputs.shapes += (inputs.shapes.empty() ? "" : " and ") + c10::str(input.toTensor().sizes());
  }
}

void OriginWatch::end(OriginWatch& watch, const at::RecordFunction& function, const Inputs& inputs) {
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    watch.node_.clear();
    return;
  }
  const at::DisableRecordFunctionGuard quiet;
  const at::NoGradGuard no_grad;
  Numbers outputs;
  for (const c10::IValue& output : function.outputs()) outputs = outputs | numbers_in(output);
  const auto note = [&](std::string& first, const char* what) {
    if (!first.empty() || makes_nothing(function.name(), *what == 'i')) return;
    first = c10::str(function.name(), " made ", what, *what == 'N' && inputs.numbers.inf ? " out of an inf" : "",
                     " (operation ", watch.operations_, ", in ",
                     watch.node_.empty() ? "the forward" : "the backward of " + watch.node_,
                     inputs.shapes.empty() ? "" : ", of ", inputs.shapes, ")");
  };
  if (outputs.nan && !inputs.numbers.nan) note(watch.nan_, "NaN");
  if (outputs.inf && !inputs.numbers.inf && !inputs.numbers.nan) note(watch.inf_, "inf");
}

std::string OriginWatch::found() const {
  if (nan_.empty()) return inf_;
  return inf_.empty() ? nan_ : inf_ + ", then " + nan_;
}

}  // namespace plumb::cli

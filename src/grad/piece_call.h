// One call of an operation over a piece, as the dispatcher hands it over: its arguments by name, and the place of its results.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "grad/piece_dispatch.h"

namespace plumb::pieces {

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), first_(stack.size() - op.schema().arguments().size()) {}

  std::string name() const { return std::string(short_name(op_.operator_name().name)); }
  at::Tensor self() const { return stack_[first_].toTensor(); }

  // Null where the operation has no such argument, or it was left out.
  const c10::IValue* operator[](const char* name) const {
    const auto index = op_.schema().argumentIndexWithName(name);
    if (!index || stack_[first_ + *index].isNone()) return nullptr;
    return &stack_[first_ + *index];
  }
  std::optional<at::ScalarType> dtype() const {
    const c10::IValue* value = (*this)["dtype"];
    return value != nullptr ? std::optional(value->toScalarType()) : std::nullopt;
  }
  double number(const char* name, double otherwise) const {
    const c10::IValue* value = (*this)[name];
    return value != nullptr ? value->toScalar().toDouble() : otherwise;
  }

  // A reduction of some dimensions alone, or one that keeps them, has no answer in pieces.
  void check_all_of(const PieceOf& piece) const {
    if (const c10::IValue* keep = (*this)["keepdim"]; keep != nullptr && keep->toBool()) {
      refuse(piece, name(), "keepdim has no shape to keep here");
    }
    const c10::IValue* dim = (*this)["dim"];
    if (dim == nullptr) return;
    std::vector<int64_t> dims = dim->isInt() ? std::vector<int64_t>{dim->toInt()} : dim->toIntVector();
    if (dims.empty()) return;
    // As the program means them: of the whole gradient, or, where it asked the piece, of that.
    for (const auto rank : {static_cast<int64_t>(piece.shape.size()), self().dim()}) {
      std::vector<bool> seen(rank);
      for (const int64_t one : dims) {
        if (one >= -rank && one < rank) seen[one < 0 ? one + rank : one] = true;
      }
      if (std::find(seen.begin(), seen.end(), false) == seen.end()) return;
    }
    refuse(piece, name(), c10::str("over dimensions ", dims, " alone, which lie on several ranks"));
  }

  // As of any empty tensor of that shape; a piece has another one.
  void ask_empty(const PieceOf& piece) {
    stack_[first_] = at::empty(piece.shape, self().options());
    op_.callBoxed(&stack_);
  }

  void give(std::initializer_list<c10::IValue> results) {
    stack_.resize(first_);
    stack_.insert(stack_.end(), results);
  }

  const c10::OperatorHandle& op() const { return op_; }
  torch::jit::Stack& stack() { return stack_; }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  size_t first_;
};

}  // namespace plumb::pieces

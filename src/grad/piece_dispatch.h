// How operations on pieces are told apart; for piece.cpp and piece_answers.cpp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <string_view>

#include "grad/piece.h"
#include "plumb/error.h"

namespace plumb::pieces {

// Above autograd, autocast and functorch's levels, so that operations come whole, before they are taken apart. It was made
// for extensions outside of torch (torchdistx, which has ended): torch itself registers nothing for it and never sets it.
// Of the keys up there, the TESTING_ONLY ones are said to be for tests alone, all others are in use in a Python process.
constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

// While it lives, this thread's operations take pieces for plain tensors.
struct Below : c10::impl::ExcludeDispatchKeyGuard {
  Below() : ExcludeDispatchKeyGuard(kKey) {}
};

// The operation was called on pieces: `stack` ends with its arguments, which the answer replaces.
using Answer = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// How an operation is answered for whole gradients; null: it is not.
Answer answer_to(const c10::OperatorName& name);

// The name as the user wrote it: without aten's namespace.
std::string_view short_name(std::string_view name);

[[noreturn]] void refuse(const PieceOf& piece, std::string_view what, const std::string& why);

// Throws unless `other` may be combined with a piece of `shape`, element by element.
void check_operand(const PieceOf& piece, at::IntArrayRef shape, const at::Tensor& other, std::string_view what);

}  // namespace plumb::pieces

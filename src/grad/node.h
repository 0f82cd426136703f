// Autograd nodes and their hooks, written once for every libtorch from 2.11 to 2.13.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <utility>

#include "plumb/error.h"

namespace plumb {

// shared_ptr up to 2.12, intrusive_ptr from 2.13.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

using torch::autograd::variable_list;

// A leaf accumulates on the stream that was current when its node was made. This one made it before anybody trained: it
// goes to the stream that is current now.
inline void accumulate_on_current(const NodePtr& node, const at::Tensor& leaf) {
  node->clear_input_metadata();
  node->add_input_metadata(leaf);
}

// Compiled autograd would take a backward apart and run it without the hooks that C++ put there.
[[noreturn]] inline void refuse_compiled_autograd() {
  throw Error(
      "compiled autograd cannot run the hooks that carry gradients to the other ranks; train without it "
      "(torch._dynamo.config.compiled_autograd = False): torch.compile() of the model, whose backward is compiled "
      "too, and overlapped with communication, needs none");
}

// Before a leaf accumulates: sees the gradient, and passes on the one it returns.
struct PreHook final : torch::autograd::FunctionPreHook {
  using Call = std::function<at::Tensor(const at::Tensor& gradient)>;
  explicit PreHook(Call call) : call(std::move(call)) {}
  variable_list operator()(const variable_list& gradients) override { return {call(gradients[0])}; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  Call call;
};

// After a leaf has accumulated: sees the gradient that came.
struct PostHook final : torch::autograd::FunctionPostHook {
  using Call = std::function<void(const at::Tensor& gradient)>;
  explicit PostHook(Call call) : call(std::move(call)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    call(inputs[0]);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  Call call;
};

}  // namespace plumb

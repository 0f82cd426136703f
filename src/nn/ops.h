// The operations behind the modules, as autograd sees them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <optional>
#include <vector>

#include "nn/wgrad.h"
#include "plumb/nn.h"

namespace plumb::nn {

// Weights keep their dtype, so that their gradients find their owner: while it lives, autocast casts nothing on this thread, and what
// comes out of other operations under it is taken in the weight's dtype.
class WithoutAutocast {
 public:
  explicit WithoutAutocast(const at::Tensor& weight);
  at::Tensor taken(const at::Tensor& value) const { return on_ ? value.to(dtype_) : value; }

 private:
  bool on_;  // for the weight's device
  at::ScalarType dtype_;
  c10::impl::ExcludeDispatchKeyGuard off_;
};

// `store`: where weight gradients wait, or null to compute them in the backward.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  std::shared_ptr<WgradStore> store);

// One layer of all experts. `weights`: one [experts, out, in], or one [out, in] per expert. `biases`: none, one
// [experts, out], or one [out] per expert.
struct Layer {
  std::vector<at::Tensor> weights, biases;
};

// An Error for rows or probabilities of another shape, and for counts that cannot be (see Groups).
at::Tensor grouped_linear(const at::Tensor& x, const Layer& layer, const Tokens& tokens, int64_t experts,
                          std::shared_ptr<WgradStore> store);

// `probabilities`: undefined, or [rows], a factor of each row's result.
at::Tensor grouped_mlp(const at::Tensor& x, const Layer& up, const Layer& down, const at::Tensor& probabilities,
                       Activation activation, const Tokens& tokens, int64_t experts, std::shared_ptr<WgradStore> store);

}  // namespace plumb::nn

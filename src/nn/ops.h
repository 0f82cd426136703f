// The operations behind the modules, as autograd sees them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "nn/wgrad.h"
#include "plumb/nn.h"

namespace plumb::nn {

// `store`: where weight gradients wait, or null to compute them in the backward.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  std::shared_ptr<WgradStore> store);

// `weights`: one [experts, out, in], or one [out, in] per expert.
at::Tensor grouped_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                          std::shared_ptr<const Groups> groups, std::shared_ptr<WgradStore> store);

at::Tensor grouped_mlp(const at::Tensor& x, const std::vector<at::Tensor>& up, const std::vector<at::Tensor>& down,
                       Activation activation, std::shared_ptr<const Groups> groups, std::shared_ptr<WgradStore> store);

}  // namespace plumb::nn

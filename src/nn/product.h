// Grouped matrix products of rows with their expert's weight, for forwards and for gradients of inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/groups.h"

namespace plumb::nn {

// One tensor [n, ...] over n tensors that lie side by side in one block of memory; undefined where they do not.
at::Tensor one_over(const std::vector<at::Tensor>& tensors);

// What libtorch's grouped product takes: the tensor itself if it lies at 16 bytes and so do its rows, or else a copy.
at::Tensor at_16_bytes(const at::Tensor& tensor);

enum class Side { forward, backward };  // x Wᵀ, or dy W

// Not differentiable: the autograd nodes call it.
at::Tensor grouped_product(const at::Tensor& x, const std::vector<at::Tensor>& weights, const Groups& groups,
                           Side side);

// Adds to every row of y its expert's bias, times the row's factor where there are some ([rows]). Waits for the counts, as
// all below. `biases`: none, one [experts, out], or one [out] per expert.
void add_bias(const at::Tensor& y, const std::vector<at::Tensor>& biases, const Groups& groups,
              const at::Tensor& factors = {});

// The gradients of the biases that are `wanted`: of each expert, the sum of its rows of dy.
std::vector<at::Tensor> bias_gradients(const at::Tensor& dy, const std::vector<at::Tensor>& biases,
                                       const std::vector<bool>& wanted, const Groups& groups);

// (x Wᵀ + b) · factors out of plain operations, which autograd can differentiate as often as it likes; x has its factors
// already.
at::Tensor plain_grouped_product(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                 const std::vector<at::Tensor>& biases, const Groups& groups,
                                 const at::Tensor& factors = {});

}  // namespace plumb::nn

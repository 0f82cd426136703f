// Grouped matrix products of rows with their expert's weight, for forwards and for gradients of inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/groups.h"

namespace plumb::nn {

// One tensor [n, ...] over n tensors that lie side by side in one block of memory; undefined where they do not.
at::Tensor one_over(const std::vector<at::Tensor>& tensors);

enum class Side { forward, backward };  // x Wᵀ, or dy W

// Not differentiable: the autograd nodes call it.
at::Tensor grouped_product(const at::Tensor& x, const std::vector<at::Tensor>& weights, const Groups& groups,
                           Side side);

// x Wᵀ out of plain operations, which autograd can differentiate as often as it likes. Waits for the counts.
at::Tensor plain_grouped_product(const at::Tensor& x, const std::vector<at::Tensor>& weights, const Groups& groups);

}  // namespace plumb::nn

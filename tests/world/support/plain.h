// Reductions over ranks, element by element as one would write them on paper: what the backends' own are compared with.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "backend/sum.h"

namespace plumb::testing {

// In rank order; bf16 and f16 summed in f32 and rounded once; integers modulo their width; a NaN anywhere stays.
at::Tensor plain_reduction(const std::vector<at::Tensor>& inputs, Reduction reduction);

// How far the plain sum of `inputs` may be from the true one, and how far `result` is: both as the largest over the
// elements of |result - true| / (|x1| + … + |xn|), with everything computed in f64.
double relative_error(const at::Tensor& result, const std::vector<at::Tensor>& inputs, Reduction reduction);

// Whether two tensors hold the same bits.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

// Numbers of every kind a dtype has: whole and broken, both signs, large beside small. No NaN.
at::Tensor varied(int64_t numel, at::ScalarType dtype, uint32_t seed);

}  // namespace plumb::testing

// The global gradient norm, and clipping by it.
#pragma once

#include <deque>

#include "grad/bucket.h"

namespace plumb {

// The 2-norm over all gradients of these buckets; a scalar on their device.
at::Tensor gradient_norm(const std::deque<Bucket>& buckets);

// Scales all gradients so that a norm of `norm` becomes at most `limit`, as torch's clip_grad_norm_ does.
void clip_gradients(std::deque<Bucket>& buckets, const at::Tensor& norm, double limit);

}  // namespace plumb

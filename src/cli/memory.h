// Memory as the allocator sees it, to be held against the estimate.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "layout/estimate.h"
#include "plumb/engine.h"

namespace plumb::cli {

// From then on every tensor on the CPU is counted. Once, before the first tensor that matters.
void count_tensors();

// The bytes of all living tensors of this process on the CPU.
int64_t tensor_bytes();

// Bytes of the engine's tensors that came from elsewhere: from a backend that offers memory of its own.
int64_t uncounted_bytes(Engine& engine);

// The sizes of a model that exists.
ModelShape shape_of(const torch::nn::Module& model);

}  // namespace plumb::cli

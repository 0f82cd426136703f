// A model in 128 bits, to compare runs by.
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "plumb/engine.h"

namespace plumb::cli {

// xxHash (XXH3, 128 bits, hex) over the f32 bits of all parameters in the order of their names. Collective: every rank
// calls it, and gets the same.
std::string model_digest(Engine& engine, const torch::nn::Module& model);

}  // namespace plumb::cli

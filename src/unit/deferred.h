// Deferred parameters: built, cut to this rank's part at once, and whole again only inside an engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "world/group.h"

namespace torch::nn {
class Module;
}

namespace plumb::deferred {

// Cuts the own parameters of a module that became a unit, where a plumb::Deferred lives on this thread.
void cut(const torch::nn::Module& module);

// Whether a parameter waits for its engine.
bool waits(const at::Tensor& parameter);

// The whole value of a parameter that waits, in its shape. An Error if the ranks did not build the same values.
// Collective; forgets it.
at::Tensor restore(const std::string& name, const at::Tensor& parameter, const World& world, Group& group);

}  // namespace plumb::deferred

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

// Cuts these parameters for the ranks of `world`.
void cut(const World& world, const std::vector<at::Tensor>& parameters);

// A parameter whose rows on this rank are `mine`, as Cut::at_rows would cut it: it has no memory from here on, and its engine,
// which must cut by rows, takes `mine` as it is.
void keep_rows(const at::Tensor& parameter, const at::Tensor& mine, int rank);
// Those rows, flat; forgets them. Undefined: nobody gave any.
at::Tensor take_rows(const at::Tensor& parameter);

// Whether a parameter waits for its engine.
bool waits(const at::Tensor& parameter);

// The whole value of a parameter that waits, in its shape. An Error if the ranks did not build the same values.
// Collective; forgets it.
at::Tensor restore(const std::string& name, const at::Tensor& parameter, const World& world, Group& group);

}  // namespace plumb::deferred

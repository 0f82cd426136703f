// The model check: every rank must have built the same model, or nobody trains.
#pragma once

#include "plumb/engine.h"

namespace plumb {

// Compares names, order, shapes, strides, dtypes, devices' types, requires_grad, each parameter's unit, the optimizer with
// all its values, and every option that numbers or messages depend on, over all ranks. Throws on every rank, naming the
// first difference. Collective. `unit_of`: by parameter; -1: of none.
void check_same_model(const World& world, const NamedTensors& parameters, const std::vector<int>& unit_of,
                      const NamedTensors& buffers, const Optimizer& optimizer, const Options& options);

// A number as short as it can be read back exactly.
std::string shortest(double value);

// By which ranks compare the values that they hold.
int64_t digest_of(const at::Tensor& tensor);

// What one process can see alone: nothing trainable, a parameter twice, memory shared by two, a device of its own.
void check_model(int rank, const NamedTensors& parameters);

// Throws `failure` on the rank that has one, and an Error that names that rank everywhere else. Collective.
void check_together(const World& world, std::exception_ptr failure);

}  // namespace plumb

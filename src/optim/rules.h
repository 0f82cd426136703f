// Rules: what each optimizer does to runs of flat memory, and which memory it needs for that.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plumb/optim.h"

namespace plumb {

// The optimizer's running values, each as large as the weights.
struct Moments {
  bool momentum = false;
  bool mean = false;
  bool square = false;
};
Moments moments_of(const Optimizer& optimizer);
// Whether an update depends on how many there were before it.
bool counts_updates(const Optimizer& optimizer);

// One run: flat tensors of one real dtype, of which those of moments_of() are defined.
struct Operands {
  at::Tensor weight, gradient, momentum, mean, square;
  at::Tensor count;  // of updates, with this one; undefined unless counts_updates()
  bool first = false;
  double lr = 0.0;
  double weight_decay = 0.0;
};
// Updates weights and moments in place; gradients are only read. Runs that differ in nothing but memory and count are one
// call of libtorch's fused kernel: on a device, a call costs the host more than the kernel takes.
void update(const Optimizer& optimizer, const std::vector<Operands>& runs);

// An Error if the values make no sense.
void check_values(int rank, const Optimizer& optimizer);

// Of an optimizer that has none: 0.
double lr_of(const Optimizer& optimizer);
double weight_decay_of(const Optimizer& optimizer);

}  // namespace plumb

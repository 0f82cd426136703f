// Optimizers as plain values: the hyper-parameters a user chooses. The engine runs them over flat memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace plumb {

struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

// As torch's Adam: the decay is added to the gradient, where AdamW shrinks the weights themselves.
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

struct SGD {
  double lr = 1e-2;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
};

struct RMSprop {
  double lr = 1e-2;
  double alpha = 0.99;  // of the running mean of squares
  double eps = 1e-8;
  double momentum = 0.0;
  double weight_decay = 0.0;
  bool centered = false;  // by the variance of the gradients instead of their mean square
};

// No optimizer: `step()` only settles the gradients, and the user's own optimizer reads `p.grad()` after it.
struct NoOptimizer {};

// The user's own optimizer over this rank's pieces of the parameters, between Engine::begin_step() and end_step().
struct UserOptimizer {};

using Optimizer = std::variant<AdamW, Adam, SGD, RMSprop, NoOptimizer, UserOptimizer>;

// A parameter group: the parameters whose name satisfies `match` take these values instead of the optimizer's.
// The first group that matches wins; every parameter outside all groups takes the optimizer's own values. `match` is asked
// once, when the engine is built.
struct ParameterGroup {
  std::function<bool(const std::string& name)> match;
  std::optional<double> lr;
  std::optional<double> weight_decay;
};

// The learning rate as a factor of each group's own, by step number (the first step is 0).
struct Schedule {
  int64_t warmup = 0;  // linear from 1/warmup to 1
  int64_t total = 0;   // 0: constant after the warm-up; otherwise cosine from 1 down to `floor` at `total`
  double floor = 0.1;
  double factor(int64_t step) const;
};

}  // namespace plumb

// Contract 3: the dtype a leaf's gradient has, decided in one function for every strategy and entrance.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace plumb {

struct GradRule {
  // The dtype a gradient is cast to when it is delivered; nullopt takes any dtype as it comes.
  std::optional<at::ScalarType> cast;
  // The dtype of the bucket: what gradients are summed in, over micro-batches and over ranks.
  at::ScalarType bucket = at::kFloat;

  bool operator==(const GradRule&) const = default;
};

// `accumulate` is the user's separate choice of the summation dtype. It never narrows: an f64 gradient is summed in f64.
GradRule grad_rule(const at::Tensor& parameter, std::optional<at::ScalarType> accumulate);

}  // namespace plumb

// A parameter of zeros.
#pragma once

#include "libtorch.h"

namespace plumb::test {

inline at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::zeros(shape, dtype).requires_grad_();
}

}  // namespace plumb::test

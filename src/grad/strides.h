// The order of a parameter's elements in memory. Gradients and state lie in that of the memory it had when they were laid out.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <string>

namespace plumb {

// Of one shape; `other` is dense, and what is not is taken for contiguous (view_in). Dimensions of one element may have any stride.
inline bool same_order(const at::Tensor& one, const at::Tensor& other) {
  if (!one.is_non_overlapping_and_dense()) return other.is_contiguous();
  for (int64_t d = 0; d < one.dim(); ++d) {
    if (one.size(d) > 1 && one.stride(d) != other.stride(d)) return false;
  }
  return true;
}

inline std::string other_order(const std::string& name, const at::Tensor& now, const at::Tensor& home) {
  return c10::str(
      "parameter '", name, "' was given memory of strides ", now.strides(), " where it had ", home.strides(),
      ", and a gradient came in that order, which is none of its state's; change the memory format of a model "
      "before its engine is built");
}

}  // namespace plumb

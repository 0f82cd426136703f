#include "grad/rule.h"

#include <c10/core/ScalarType.h>

namespace plumb {

namespace {

// Holds numbers of both. Weights of 8 bits, which are frozen, promote to nothing.
at::ScalarType wider(at::ScalarType one, at::ScalarType other) {
  return c10::isFloat8Type(one) ? other : c10::promoteTypes(one, other);
}

}  // namespace

GradRule grad_rule(const at::Tensor& parameter, std::optional<at::ScalarType> accumulate) {
  GradRule rule;
  rule.cast = parameter.grad_dtype();  // unset: the parameter's dtype; set: that dtype; set to None: nullopt
  // A gradient of any dtype needs a bucket that holds bf16, f16 and f32 alike.
  rule.bucket = rule.cast.value_or(wider(parameter.scalar_type(), at::kFloat));
  if (accumulate) rule.bucket = wider(rule.bucket, *accumulate);
  return rule;
}

}  // namespace plumb

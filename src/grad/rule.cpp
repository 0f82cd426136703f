#include "grad/rule.h"

#include <c10/core/ScalarType.h>

namespace plumb {

GradRule grad_rule(const at::Tensor& parameter, std::optional<at::ScalarType> accumulate) {
  GradRule rule;
  rule.cast = parameter.grad_dtype();  // unset: the parameter's dtype; set: that dtype; set to None: nullopt
  // A gradient of any dtype needs a bucket that holds bf16, f16 and f32 alike. Frozen weights of 8 bits promote to nothing.
  const at::ScalarType own = parameter.scalar_type();
  const at::ScalarType wide = c10::isFloat8Type(own) ? at::kFloat : c10::promoteTypes(own, at::kFloat);
  rule.bucket = rule.cast.value_or(wide);
  if (accumulate) rule.bucket = c10::promoteTypes(rule.bucket, *accumulate);
  return rule;
}

}  // namespace plumb

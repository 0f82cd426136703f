#include "grad/rule.h"

#include <c10/core/ScalarType.h>

namespace plumb {

GradRule grad_rule(const at::Tensor& parameter, std::optional<at::ScalarType> accumulate) {
  GradRule rule;
  rule.cast = parameter.grad_dtype();  // unset: the parameter's dtype; set: that dtype; set to None: nullopt
  // A gradient of any dtype needs a bucket that holds bf16, f16 and f32 alike.
  rule.bucket = rule.cast.value_or(c10::promoteTypes(parameter.scalar_type(), at::kFloat));
  if (accumulate) rule.bucket = c10::promoteTypes(rule.bucket, *accumulate);
  return rule;
}

}  // namespace plumb

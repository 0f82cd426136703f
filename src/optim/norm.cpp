#include "optim/norm.h"

#include <ATen/ATen.h>

#include "optim/runs.h"

namespace plumb {
namespace {

bool any_two(const Sink&, const Sink&) { return true; }

}  // namespace

at::Tensor gradient_norm(const std::deque<Bucket>& buckets) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  at::TensorOptions options = at::kFloat;
  for (const Bucket& bucket : buckets) {
    options = options.device(bucket.gradient.device());
    for (const Run& run : runs_of(bucket, any_two)) {
      const at::Tensor gradient = part(bucket.gradient, run);
      const auto wide = c10::promoteTypes(gradient.scalar_type(), at::kFloat);
      norms.push_back(at::linalg_vector_norm(gradient, 2, std::nullopt, false, wide).to(at::kDouble));
    }
  }
  if (norms.empty()) return at::zeros({}, options);
  return norms.size() == 1 ? norms[0].to(at::kFloat) : at::linalg_vector_norm(at::stack(norms)).to(at::kFloat);
}

void clip_gradients(std::deque<Bucket>& buckets, const at::Tensor& norm, double limit) {
  at::NoGradGuard no_grad;
  const at::Tensor coefficient = (limit / (norm + 1e-6)).clamp_max(1.0);
  // On the CPU the value is at hand, and most steps need no scaling.
  if (norm.is_cpu() && coefficient.item<double>() >= 1.0) return;
  for (Bucket& bucket : buckets) {
    for (const Run& run : runs_of(bucket, any_two)) part(bucket.gradient, run).mul_(coefficient);
    for (Sink* sink : bucket.sinks) sink->adopt(false);
  }
}

}  // namespace plumb

// The learning-rate schedule: linear warm-up, then cosine.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "plumb/optim.h"

namespace plumb {

double Schedule::factor(int64_t step) const {
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (total <= warmup) return 1.0;
  const double done = std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(total - warmup));
  return floor + (1.0 - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
}

}  // namespace plumb

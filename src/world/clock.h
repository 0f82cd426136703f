// One clock for all ranks of a world.
#pragma once

#include <chrono>

#include "plumb/world.h"
#include "watch/timeline.h"

namespace plumb {

// Rank 0's `origin` on this rank's clock, which the true one is no further from than `error`: nobody leaves a barrier before
// everybody came, which bounds what clocks differ by from both sides. Collective.
struct Origin {
  Timeline::Moment moment{};
  std::chrono::nanoseconds error{0};
};
Origin common_origin(const World& world, Timeline::Moment origin);

}  // namespace plumb

// How much is on its way at a time. What sends keeps to these numbers, and the formula of durations reckons with them.
#pragma once

#include <cstdint>

namespace plumb {

constexpr int64_t kTogether = 512 << 10;  // bytes of a message that small neighbours share where messages are dear
// Messages of whole gradients: one being filled, one being reduced.
constexpr int64_t kScatteredAtATime = 2;
// Pieces on their way between the replicas; they lie where they stay, or are as small.
constexpr int64_t kCrossingAtATime = 8;
constexpr int64_t kUpdatesAtATime = 3;  // gathers of updated parameters; a backend may hold a copy of each

}  // namespace plumb

// How much --record holds in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace plumb::cli {

constexpr size_t kStepsHeld = 3;
constexpr int64_t kBytesHeld = 256 << 20;

// How many of the last steps are held, where the inputs of each have these bytes: as many as fit, the last one always.
inline size_t steps_held(std::span<const int64_t> bytes) {
  size_t held = 0;
  int64_t sum = 0;
  while (held < std::min(bytes.size(), kStepsHeld)) {
    sum += bytes[bytes.size() - 1 - held];
    if (held > 0 && sum > kBytesHeld) break;
    ++held;
  }
  return held;
}

}  // namespace plumb::cli

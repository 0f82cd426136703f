// The same function called plainly or through a checkpoint, and the memory that it holds.
#pragma once
#include <c10/util/ThreadLocalDebugInfo.h>

#include "plumb/checkpoint.h"

namespace plumb::test {

// Calls `body` directly, or through a checkpoint.
struct Through {
  bool recompute = false;
  template <class Body, class... Inputs>
  auto operator()(Body body, Inputs... inputs) const {
    return recompute ? plumb::checkpoint(body, inputs...) : body(inputs...);
  }
};

// Bytes of CPU tensors that this thread, and backwards it starts, have made and not freed.
struct Meter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t change, size_t, size_t, c10::Device) override {
    now += change;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, peak = 0;
};

}  // namespace plumb::test

// The next multiple.
#pragma once

#include <cstdint>

namespace plumb {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace plumb

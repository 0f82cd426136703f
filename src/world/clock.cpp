#include "world/clock.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "world/group.h"

namespace plumb {

Origin common_origin(const World& world, Timeline::Moment origin) {
  constexpr size_t barriers = 8;
  const auto ns = [](Timeline::Moment moment) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count();
  };
  std::vector<int64_t> mine{ns(origin)};
  for (size_t i = 0; i < barriers; ++i) {
    mine.push_back(ns(std::chrono::steady_clock::now()));
    world.barrier();
    mine.push_back(ns(std::chrono::steady_clock::now()));
  }
  const Where where{Where::Kind::setup, 0, 0, "the clock of a trace"};
  const std::vector<int64_t> first = exchange(world, mine, where)[0];
  // What this clock shows more than rank 0's: this rank left after rank 0 came, and came before rank 0 left.
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  for (size_t i = 1; i < mine.size(); i += 2) {
    least = std::max(least, mine[i] - first[i + 1]);
    most = std::min(most, mine[i + 1] - first[i]);
  }
  const int64_t more = world.rank() == 0 ? 0 : least + (most - least) / 2;
  return {Timeline::Moment(std::chrono::nanoseconds(first[0] + more)),
          std::chrono::nanoseconds(world.rank() == 0 ? 0 : (most - least + 1) / 2)};
}

}  // namespace plumb

#include "cli/wire_account.h"

#include <algorithm>
#include <array>

namespace plumb::cli {

void WireAccount::end() {
  if (steps_++ == 0) return;
  const Wire::Counts now = wire_counts(world_);
  for (size_t kind = 0; kind < now.size(); ++kind) {
    const Wire::Count more = now[kind] - before_[kind];
    Wire::Count& sum = sums_[kind];
    sum = {sum.rounds + more.rounds, sum.messages + more.messages, sum.bytes + more.bytes, sum.waits + more.waits,
           sum.blocked + more.blocked};
  }
}

nlohmann::ordered_json WireAccount::to_json() const {
  const double steps = static_cast<double>(std::max<int64_t>(1, steps_ - 1));
  nlohmann::ordered_json kinds;
  double bytes = 0;
  constexpr std::array names = {"data", "control", "gather", "store"};
  for (size_t kind = 0; kind < names.size(); ++kind) {
    const Wire::Count& sum = sums_[kind];
    const auto each = [&](int64_t count) { return static_cast<double>(count) / steps; };
    bytes += each(sum.bytes);
    kinds[names[kind]] = {{"rounds", each(sum.rounds)},
                          {"messages", each(sum.messages)},
                          {"bytes", each(sum.bytes)},
                          {"waits", each(sum.waits)},
                          {"blocked", each(sum.blocked)}};
  }
  nlohmann::ordered_json all = {{"blocking_waits_per_step", kinds["control"]["waits"]},
                                {"control_rounds_per_step", kinds["control"]["rounds"]},
                                {"bytes_per_step", bytes}};
  all.update(kinds);
  return all;
}

}  // namespace plumb::cli

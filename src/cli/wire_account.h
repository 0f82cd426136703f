// What the engine's communication cost this rank in the steps that are counted: from the second on, which finds its buckets.
#pragma once

#include <nlohmann/json.hpp>

#include "watch/wire.h"

namespace plumb::cli {

class WireAccount {
 public:
  explicit WireAccount(const World& world) : world_(world) {}
  void begin() { before_ = wire_counts(world_); }
  void end();
  nlohmann::ordered_json to_json() const;

 private:
  const World& world_;
  Wire::Counts before_{}, sums_{};
  int64_t steps_ = 0;
};

}  // namespace plumb::cli

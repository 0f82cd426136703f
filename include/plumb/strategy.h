// The placement table: one row per strategy, read as "where does this one thing live?".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace plumb {

enum class Placement { replicated, sharded };

struct Strategy {
  std::string name;
  Placement parameter = Placement::replicated;
  Placement gradient = Placement::replicated;
  Placement state = Placement::replicated;
};

// Every row, in the order of the table in docs/design.md.
const std::vector<Strategy>& strategies();

// The row called `name`; an Error that lists the names otherwise.
const Strategy& strategy(std::string_view name);

}  // namespace plumb

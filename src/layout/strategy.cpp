// The placement table.
#include "plumb/strategy.h"

#include "plumb/error.h"

namespace plumb {

const std::vector<Strategy>& strategies() {
  using enum Placement;
  static const std::vector<Strategy> rows = {
      //        parameter   gradient    state
      {"ddp", replicated, replicated, replicated},
  };
  return rows;
}

const Strategy& strategy(std::string_view name) {
  std::string known;
  for (const Strategy& row : strategies()) {
    if (row.name == name) return row;
    known += (known.empty() ? "" : ", ") + row.name;
  }
  throw Error("unknown strategy '" + std::string(name) + "'; known strategies: " + known);
}

}  // namespace plumb

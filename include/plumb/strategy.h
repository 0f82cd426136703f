// The placement table: one row per strategy, read as "where does this one thing live?".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace plumb {

enum class Placement { replicated, sharded };

// The world as two axes: what is sharded is cut over `shard` ranks, and every cut is kept by `replicate` groups of them.
// Rank = replica · shard + part. 0: whatever the strategy and the other axis leave.
struct Mesh {
  int replicate = 0;
  int shard = 0;
};

struct Strategy {
  std::string name;
  Placement parameter = Placement::replicated;
  Placement gradient = Placement::replicated;
  Placement state = Placement::replicated;
  int replicate = 1;  // groups of ranks that each hold everything, where no mesh is given and the world divides
};

// Every row, in the order of the table in docs/design.md.
const std::vector<Strategy>& strategies();

// The row called `name`; an Error that lists the names otherwise.
const Strategy& strategy(std::string_view name);

// The axes of a world of `size` ranks: `asked` where it says something, otherwise the row's own. An Error when they do
// not multiply to the world.
Mesh mesh_of(const Strategy& row, Mesh asked, int size);

}  // namespace plumb

// The placement table.
#include "plumb/strategy.h"

#include "plumb/error.h"

namespace plumb {

const std::vector<Strategy>& strategies() {
  using enum Placement;
  static const std::vector<Strategy> rows = {
      //        parameter   gradient    state
      {"ddp", replicated, replicated, replicated},
      {"zero1", replicated, replicated, sharded},
      {"zero2", replicated, sharded, sharded},
      {"zero3", sharded, sharded, sharded},
      {"hsdp", sharded, sharded, sharded, /*replicate=*/2},
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

Mesh mesh_of(const Strategy& row, Mesh asked, int size) {
  Mesh mesh = asked;
  if (mesh.replicate < 0 || mesh.shard < 0) {
    throw Error("the mesh is replicate=" + std::to_string(mesh.replicate) + ", shard=" + std::to_string(mesh.shard) +
                "; both must be positive");
  }
  if (mesh.replicate == 0 && mesh.shard == 0) mesh.replicate = size % row.replicate == 0 ? row.replicate : 1;
  if (mesh.shard == 0 && size % mesh.replicate == 0) mesh.shard = size / mesh.replicate;
  if (mesh.replicate == 0 && size % mesh.shard == 0) mesh.replicate = size / mesh.shard;
  if (mesh.replicate * mesh.shard != size) {
    const bool both = mesh.replicate != 0 && mesh.shard != 0;  // otherwise the other axis cannot be told from this one
    std::string axes;
    if (mesh.replicate != 0) axes = "replicate=" + std::to_string(mesh.replicate);
    if (mesh.shard != 0) axes += (both ? ", shard=" : "shard=") + std::to_string(mesh.shard);
    throw Error("the mesh " + axes + (both ? " does not multiply to" : " does not divide") + " the world of " +
                std::to_string(size) + (size == 1 ? " rank" : " ranks") +
                "; choose axes whose product is the number of ranks");
  }
  return mesh;
}

}  // namespace plumb

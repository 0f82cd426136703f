// Team: the ranks that the gradients of one engine travel between, as a mesh with a process group for each axis.
#pragma once

#include <memory>
#include <utility>

#include "plumb/engine.h"
#include "plumb/strategy.h"
#include "world/group.h"

namespace plumb {

class Team {
 public:
  Team(World world, const Options& options)
      : world_(std::move(world)), row_(strategy(options.strategy)), mesh_(mesh_of(row_, options.mesh, world_.size())),
        groups_(new_groups(world_, mesh_)) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  const World& world() const { return world_; }
  const Strategy& row() const { return row_; }
  const Mesh& mesh() const { return mesh_; }
  int rank() const { return world_.rank(); }
  int size() const { return groups_.data.size(); }

  Group& data() { return groups_.data; }                    // carries gradients on their device
  Group& control() { return groups_.control; }              // carries small host messages
  Group& shard() { return groups_.shard; }                  // the ranks that share this rank's replica
  Group& replicate() { return groups_.replicate; }          // the ranks that hold the same part
  Group& shard_control() { return groups_.shard_control; }  // small host messages among these
  // Apart from the others, so that gathers and reductions need no common order. Made when first asked for; collective.
  Groups& gathers() {
    if (!gathers_) gathers_ = std::make_unique<Groups>(new_groups(world_, mesh_));
    return *gathers_;
  }

  // Whether what is placed so lies in parts here; of one rank, everything is whole.
  bool shards(Placement placement) const { return placement == Placement::sharded && groups_.shard.size() > 1; }
  bool shards_gradient() const { return shards(row_.gradient); }

 private:
  World world_;
  const Strategy& row_;
  Mesh mesh_;
  Groups groups_;
  std::unique_ptr<Groups> gathers_;
};

}  // namespace plumb

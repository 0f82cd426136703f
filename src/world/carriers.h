// Carriers: which backend carries the collectives of which ranks of a world, and the groups over them.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backend/hierarchy.h"
#include "backend/machines.h"
#include "world/environment.h"
#include "world/world_impl.h"

namespace plumb {

class Carriers {
 public:
  Place place;
  std::string backend{};  // of the world: "shm", "tcp", "shm+tcp", "gloo", "nccl"
  Machines machines = Machines::apart(1);
  std::shared_ptr<ShmHeap> heap{};  // of the ranks of this rank's machine; null where they share none
  std::string address{};            // that the others reach this rank at
  std::chrono::microseconds patience{50};
  std::chrono::milliseconds timeout{60'000};
  std::shared_ptr<Watch> watch{};
  c10::intrusive_ptr<c10d::Store> store{};

  // All ranks share memory.
  bool in_one_memory() const { return heap && machines.count() == 1; }

  // The groups over all ranks, the `number`th pair of them.
  World::Impl::Pair pair(int number) const;
  // A group of some ranks, `members` in their order, of which this one is `rank`; all know it by `name`.
  std::shared_ptr<Group::Impl> part(const std::string& name, const std::vector<int>& members, int rank,
                                    int index) const;

 private:
  using Keys = c10::intrusive_ptr<c10d::Store>;
  c10::intrusive_ptr<c10d::Backend> sockets(const Keys& keys, const char* what, int rank, int size,
                                            const Names& names = {}) const;
  HierarchyOptions steps(const Tiers& tiers, int rank, c10::intrusive_ptr<c10d::Backend> flat, Cargo cargo) const;
};

}  // namespace plumb

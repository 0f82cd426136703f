// What a World holds, and how one is put together.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/hierarchy.h"
#include "backend/links.h"
#include "backend/rounds.h"
#include "watch/process.h"
#include "watch/road.h"
#include "watch/watch.h"
#include "world/group.h"

namespace plumb {

class ShmHeap;

struct Group::Impl : std::enable_shared_from_this<Group::Impl> {
  c10::intrusive_ptr<c10d::Backend> backend;  // null: one rank
  std::shared_ptr<Watch> watch;
  int index = data_index;
  int rank = 0;
  int size = 1;
  // The backend sums shards itself; otherwise all-to-all and a sum on this rank.
  bool native_reduce_scatter = true;
  // The backend moves every dtype; otherwise gathered and broadcast memory travels as bytes.
  bool any_dtype = true;
  Carriage carriage = Carriage::ring;
  // The memory that the backend offers is the host's; otherwise a device's.
  bool host_memory = false;
  // The backend counts itself what crosses: not every rank sends.
  bool counts_itself = false;
  // By which units are gathered, where ranks of one machine do so together; otherwise each from each.
  c10::intrusive_ptr<Hierarchy> gathers;
  // Memory that the ranks of this group share beside the backend's, if there is any; `meet` finds it, once. Collective.
  std::function<std::shared_ptr<ShmHeap>()> meet;
  std::shared_ptr<ShmHeap> met;
  // Whose collectives these are, by number and by rank of the world; null: all ranks.
  int64_t circle = 0;
  std::shared_ptr<const std::vector<int>> members;
  int me() const { return members ? (*members)[static_cast<size_t>(rank)] : rank; }  // in the world
  const OwnProcess process;
  std::mutex issuing;                                        // one order for the backend's count and ours
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> pending;  // issued and perhaps not ended

  // Messages between two ranks, where the backend has them (otherwise null); made when first used.
  bool has_links = false;
  Links* links(Cargo cargo);
  std::unique_ptr<Links> control_links, gather_links;

  // Forgets works that have ended: a weak pointer keeps an intrusive object, and the tensors in it, from being destroyed.
  void forget_ended();

  ~Impl();
};

// A group over `backend` that knows what this kind of backend does by itself.
std::shared_ptr<Group::Impl> make_group(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Watch> watch,
                                        int index);
// One of some ranks of the world, which all know it by this name.
std::shared_ptr<Group::Impl> make_group(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Watch> watch,
                                        int index, const std::string& name, const std::vector<int>& members);

struct World::Impl {
  struct Pair {
    std::shared_ptr<Group::Impl> data;
    std::shared_ptr<Group::Impl> control;
  };

  const OwnProcess process;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int ranks_per_machine = 0;  // where all machines have equally many, in order; 0: they have not, or it is not known
  std::string backend = "local";
  std::chrono::milliseconds timeout{60'000};
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<Watch> watch;  // null: one rank
  Timeline timeline;             // of one rank; others' is the watch's
  Road road{0};                  // the same
  std::shared_ptr<Group::Impl> data = std::make_shared<Group::Impl>();
  std::shared_ptr<Group::Impl> control = data;
  // Makes another pair of groups, the `number`th; null: the world's own serve every engine.
  std::function<Pair(int number)> another;
  // Makes a group of some ranks, `members` in their order, of which this one is `rank`; the same `name` on all of them.
  // `index`: what it carries, as the pair of that index does.
  std::function<std::shared_ptr<Group::Impl>(const std::string& name, const std::vector<int>& members, int rank,
                                             int index)>
      part;
  int engines = 0;  // that asked for groups so far

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();
};

}  // namespace plumb

// The `shm+tcp` backend: collectives of host memory between machines that have several ranks each.
//
// What is summed or gathered goes through shared memory inside of each machine, and the machine's first rank alone talks to
// the other machines: one stream per machine crosses the network, however many ranks it has. Each call takes three steps:
// the machine's ranks to its first, the first ranks among each other (`tcp`), the first to its machine's ranks. Threads do
// them, in the order of the calls, beside whatever the ranks compute.
//
// Sums are by machine, in rank order, and then over the machines in order; bf16 and f16 in f32, rounded once: the same bits
// on every rank and every time. What is different for each pair of ranks (all_to_all, messages) crosses as over `tcp`.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "backend/machines.h"
#include "backend/names.h"
#include "watch/wire.h"

namespace plumb {

class ShmHeap;

// Like any backend, it carries collectives in one order; gathers are ordered among them.
class Hierarchy : public c10d::Backend {
 public:
  using Backend::Backend;
  // As an all-gather. Ranks that say different things of it (`what`) never fill each other's memory: they wait.
  virtual c10::intrusive_ptr<c10d::Work> gather(at::Tensor& full, at::Tensor& shard, uint64_t what) = 0;
  // The memory that this rank's machine shares; null where it is alone there.
  virtual const std::shared_ptr<ShmHeap>& heap() const = 0;
};

struct HierarchyOptions {
  Tiers tiers;
  int rank = 0;
  Names names{};                             // of the ranks in errors
  std::shared_ptr<ShmHeap> heap{};           // of the ranks of this machine; null where there is but one
  int64_t serial = 0;                        // of the first of `serials` groups in that memory
  static constexpr int serials = 2;          // that it takes
  c10::intrusive_ptr<c10d::Backend> flat{};  // between all ranks, for what the machines do not do together
  std::string address{};                     // that the others reach this rank at
  std::chrono::microseconds patience{50};
  std::chrono::milliseconds timeout{60'000};
  std::shared_ptr<Wire> wire{};
  Cargo cargo = Cargo::data;
};

// Collective. `store` has keys of this group alone.
c10::intrusive_ptr<Hierarchy> make_hierarchy(const c10::intrusive_ptr<c10d::Store>& store, HierarchyOptions options);

// `backend`, if it is one; null otherwise.
Hierarchy* hierarchy_of(c10d::Backend& backend);

}  // namespace plumb

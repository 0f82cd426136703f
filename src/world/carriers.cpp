#include "world/carriers.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/gloo.h"
#include "backend/nccl.h"
#include "backend/shm_ring.h"
#include "backend/tcp.h"

namespace plumb {
namespace {

c10::intrusive_ptr<c10d::Store> under(const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& keys) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, keys);
}

// How some of the ranks, whose backend has no shared memory, find some, if those are on one machine.
std::function<std::shared_ptr<ShmHeap>()> meeting(const c10::intrusive_ptr<c10d::Store>& keys, int rank, int size) {
  return [=] {
    std::string why_not;
    c10d::PrefixStore store("window", keys);
    return ShmHeap::meet(store, rank, size, why_not);
  };
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> Carriers::sockets(const Keys& keys, const char* what, int rank, int size,
                                                    const Names& names) const {
  return make_tcp_backend(under(what, keys), rank, size, address, patience, names);
}

HierarchyOptions Carriers::steps(const Tiers& tiers, int rank, c10::intrusive_ptr<c10d::Backend> flat,
                                 Cargo cargo) const {
  HierarchyOptions options;
  options.tiers = tiers;
  options.rank = rank;
  options.flat = std::move(flat);
  options.address = address;
  options.timeout = timeout;
  options.wire = watch->wire();
  options.cargo = cargo;
  return options;
}

World::Impl::Pair Carriers::pair(int number) const {
  const Keys keys = under("groups/" + std::to_string(number), store);
  const bool memory = in_one_memory();
  std::vector<int> everybody(place.size);
  std::iota(everybody.begin(), everybody.end(), 0);
  // Host messages go through memory where there is some, whatever carries the gradients.
  const auto control = memory ? make_shm_backend(heap, *keys, int64_t{2} * number, timeout)
                              : sockets(keys, "control", place.rank, place.size);
  c10::intrusive_ptr<c10d::Backend> data;
  c10::intrusive_ptr<Hierarchy> gathers;
  if (backend == "gloo") data = make_gloo(keys, place.rank, place.size, timeout, address, 1)[0];
  if (backend == "tcp") data = sockets(keys, "data", place.rank, place.size);
  if (backend == "shm") data = make_shm_backend(heap, *keys, int64_t{2} * number + 1, timeout);
  if (backend == "nccl") data = make_nccl(under("nccl", keys), place.rank, place.size, place.local_rank, timeout);
  if (backend == "shm+tcp") {
    const Tiers tiers = *machines.tiers(everybody);
    auto sums = steps(tiers, place.rank, sockets(keys, "data", place.rank, place.size), Cargo::data);
    auto units = steps(tiers, place.rank, control, Cargo::gather);
    sums.heap = units.heap = heap;
    sums.serial = int64_t{2} * HierarchyOptions::serials * number;
    units.serial = sums.serial + HierarchyOptions::serials;
    data = make_hierarchy(under("sums", keys), std::move(sums));
    gathers = make_hierarchy(under("gathers", keys), std::move(units));
  }
  const std::string name = std::to_string(number);
  World::Impl::Pair pair{make_group(data, watch, data_index, "data " + name, everybody),
                         make_group(control, watch, control_index, "control " + name, everybody)};
  pair.control->gathers = std::move(gathers);
  if (memory) pair.data->met = heap;
  return pair;
}

std::shared_ptr<Group::Impl> Carriers::part(const std::string& name, const std::vector<int>& members, int rank,
                                            int index) const {
  const Keys keys = under("parts/" + name, store);
  const int size = static_cast<int>(members.size());
  const Names names(members);
  const bool data = index == data_index;
  const bool asked_for = backend == "gloo" || backend == "tcp" || backend == "nccl";  // to carry gradients
  if (backend == "nccl" && data) {
    return make_group(make_nccl(keys, rank, size, place.local_rank, timeout), watch, index, name, members);
  }
  if (heap && machines.together(members) && !(data && asked_for)) {
    std::string cannot;
    auto own = ShmHeap::meet(*keys, rank, size, cannot, names);
    if (!own) throw Error(place.rank, "the ranks of one axis cannot share memory: " + cannot);
    return make_group(make_shm_backend(std::move(own), *keys, 0, timeout, names), watch, index, name, members);
  }
  if (backend == "gloo" && data) {
    auto group = make_group(make_gloo(keys, rank, size, timeout, address, 1)[0], watch, index, name, members);
    group->meet = meeting(keys, rank, size);
    return group;
  }
  const auto flat = sockets(keys, "tcp", rank, size, names);
  const auto tiers = backend == "shm+tcp" ? machines.tiers(members) : std::nullopt;
  if (!tiers) {
    auto group = make_group(flat, watch, index, name, members);
    if (machines.together(members)) group->meet = meeting(keys, rank, size);
    return group;
  }
  HierarchyOptions options = steps(*tiers, rank, flat, data ? Cargo::data : Cargo::gather);
  options.names = names;
  const int machine = tiers->machine_of(rank);
  if (tiers->ranks_on(machine) > 1) {
    std::string cannot;
    const Keys own = under("machine " + std::to_string(machine), keys);
    const int first = tiers->first[machine], ranks = tiers->ranks_on(machine);
    options.heap = ShmHeap::meet(*own, rank - first, ranks, cannot, names.part(first, ranks));
    if (!options.heap) throw Error(place.rank, "the ranks of one machine cannot share memory: " + cannot);
  }
  auto hierarchy = make_hierarchy(under("tiers", keys), std::move(options));
  if (data) return make_group(std::move(hierarchy), watch, index, name, members);
  auto group = make_group(flat, watch, index, name, members);
  group->gathers = std::move(hierarchy);
  return group;
}

}  // namespace plumb

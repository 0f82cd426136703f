// Small host messages between all ranks, and the groups of a world.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "backend/shm_ring.h"
#include "world/world_impl.h"

namespace plumb {

Group data_group(const World& world) { return Group(world.impl().data); }
Group control_group(const World& world) { return Group(world.impl().control); }

Groups new_groups(const World& world, const Mesh& mesh) {
  World::Impl& impl = world.impl();
  const int number = impl.engines++;
  const bool own = number > 0 && impl.another;
  const World::Impl::Pair pair = own ? impl.another(number) : World::Impl::Pair{impl.data, impl.control};
  // An axis over the whole world is the world; one of a single rank talks to nobody.
  auto axis = [&](const char* name, int size, int color, int rank, int index = data_index) {
    if (size == impl.size) return Group(index == data_index ? pair.data : pair.control);
    if (size == 1) return Group();
    if (!impl.part) {
      throw Error(impl.rank,
                  "a mesh of several axes needs communication that Plumb made (World::join or run_local); "
                  "this world was adopted");
    }
    std::vector<int> members;
    for (int r = 0; r < impl.size; ++r) {
      const int its_color = name[0] == 's' ? r / mesh.shard : r % mesh.shard;
      if (its_color == color) members.push_back(r);
    }
    const char* kind = index == data_index ? "/" : "/control-";
    return Group(impl.part(std::to_string(number) + kind + name + std::to_string(color), members, rank, index));
  };
  return {Group(pair.data), Group(pair.control),
          axis("shard", mesh.shard, impl.rank / mesh.shard, impl.rank % mesh.shard),
          axis("replicate", mesh.replicate, impl.rank % mesh.shard, impl.rank / mesh.shard),
          axis("shard", mesh.shard, impl.rank / mesh.shard, impl.rank % mesh.shard, control_index)};
}

std::vector<std::vector<int64_t>> exchange(const World& world, std::span<const int64_t> mine, const Where& where) {
  return control_group(world).exchange(mine, where);
}

namespace {

// Threads of one process: everybody holds on to everybody's storage.
std::vector<at::Tensor> peers_of_threads(Group& group, const at::Tensor& mine, const Where& where) {
  const std::array<int64_t, 2> place{reinterpret_cast<int64_t>(mine.storage().unsafeGetStorageImpl()),
                                     mine.storage_offset()};
  std::vector<at::Tensor> all;
  for (const auto& other : group.exchange(place, where)) {
    auto* impl = reinterpret_cast<c10::StorageImpl*>(other[0]);
    const auto shared = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl);
    all.push_back(at::empty({0}, mine.options()).set_(c10::Storage(shared), other[1], mine.sizes(), mine.strides()));
  }
  group.barrier().wait(where);  // nobody lets go before everybody holds on
  return all;
}

// Processes that map each other's segments. Where one had no shared memory left, nobody reads in place.
std::vector<at::Tensor> peers_of_processes(Group& group, const std::shared_ptr<ShmHeap>& heap, const at::Tensor& mine,
                                           const Where& where) {
  const int64_t offset = heap->offset_of(mine.const_data_ptr());
  const auto offsets = group.exchange(std::span(&offset, 1), where);
  const int size = static_cast<int>(offsets.size());
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r) {
    if (heap->within(r, offsets[r][0], static_cast<int64_t>(mine.nbytes()))) continue;
    if (offset >= 0) heap->keep_window(mine);
    return all;
  }
  for (int r = 0; r < size; ++r) {
    all.push_back(r == heap->rank() ? mine : heap->window_of(r, offsets[r][0], mine.numel(), mine.options()));
  }
  return all;
}

}  // namespace

Group::Shared Group::share(int64_t numel, const at::TensorOptions& options, const Where& where) {
  Shared shared;
  std::shared_ptr<ShmHeap> heap;
  const bool alone = size() == 1;
  if (!alone && impl_->watch->wire()->shaped()) return {allocate(numel, options), {}};
  const bool threads = !alone && impl_->backend->getBackendName() == "local";
  if (!alone && !threads && options.device().is_cpu()) {  // devices do not read each other here
    // Processes of one machine share memory for this whatever carries their collectives.
    heap = heap_of(*impl_->backend);
    if (impl_->meet) impl_->met = std::exchange(impl_->meet, {})();
    if (!heap) heap = impl_->met;
  }
  if (heap) shared.mine = heap->window(numel, options);
  if (!shared.mine.defined()) shared.mine = allocate(numel, options);
  if (alone) {
    shared.everybody = {shared.mine};
  } else if (heap) {
    shared.everybody = peers_of_processes(*this, heap, shared.mine, where);
  } else if (threads && options.device().is_cpu()) {
    shared.everybody = peers_of_threads(*this, shared.mine, where);
  }
  return shared;
}

void Group::let_go() const {
  if (!impl_->backend) return;
  if (const auto heap = heap_of(*impl_->backend)) heap->advance_all();
  if (const Hierarchy* machines = hierarchy_of(*impl_->backend); machines != nullptr && machines->heap()) {
    machines->heap()->advance_all();
  }
}

std::vector<std::string> exchange_text(const World& world, const std::string& mine, const Where& where) {
  if (world.size() == 1) return {mine};
  const int64_t length = static_cast<int64_t>(mine.size());
  const auto lengths = exchange(world, std::span<const int64_t>(&length, 1), where);
  int64_t longest = 0;
  for (const auto& one : lengths) longest = std::max(longest, one[0]);
  if (longest == 0) return std::vector<std::string>(world.size());
  at::Tensor shard = at::empty({longest}, at::kByte);
  shard.zero_();
  std::memcpy(shard.data_ptr(), mine.data(), mine.size());
  at::Tensor full = at::empty({longest * world.size()}, at::kByte);
  control_group(world).all_gather(full, shard).wait(where);
  std::vector<std::string> all;
  const char* bytes = static_cast<const char*>(full.data_ptr());
  for (int r = 0; r < world.size(); ++r) all.emplace_back(bytes + r * longest, lengths[r][0]);
  return all;
}

Wire::Counts wire_counts(const World& world) {
  const auto& watch = world.impl().watch;
  if (!watch) return {};
  Wire::Counts counts = watch->wire()->counts();
  counts[static_cast<size_t>(Cargo::store)].messages = watch->store_messages();
  return counts;
}

void report_failure(const World& world, const std::string& what, const Where& where) {
  if (const auto& watch = world.impl().watch) watch->fail(what, world.rank(), where);
}

}  // namespace plumb

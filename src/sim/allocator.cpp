// The caching, poisoning allocator of the simulated devices.
//
// A freed block goes back to its stream's pool at once, but the earliest moment it can be handed out again is that
// stream's next allocation: there the poison is enqueued as a write of the owner stream. Whoever still uses the block
// unordered with that is an ordinary race; an owner that waits between the free and its next allocation is not.
#include "sim/allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "sim/machine.h"

namespace plumb::sim {
namespace {

constexpr size_t granule = 512;
constexpr size_t small_request = 1 << 20;
constexpr size_t small_segment = 2 << 20;
constexpr int poison = 0xFF;  // NaN in every floating type, -1 in integers

struct Block {
  char* begin = nullptr;
  size_t size = 0;
  uint64_t serial = 0;
  int device = 0;
  int stream = 0;  // the owner's id
  bool free = false;
  bool used_before = false;
  Block* previous = nullptr;  // neighbours in the segment
  Block* next = nullptr;
  std::set<int> recorded;           // other streams that use it
  std::vector<EventState> pending;  // what they had to do when it was freed
  Label scope = 0;                  // where it was allocated
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->serial < b->serial;
  }
};

struct Pool {
  std::set<Block*, BySize> free;
  std::vector<Block*> returned;  // since the stream's last allocation
};

struct Heap {
  std::map<int, Pool> pools;            // by owner stream
  std::map<char*, Block*> segments;     // first block of each, by address
  std::multimap<size_t, char*> spares;  // whole segments that belong to no stream now
  std::vector<Block*> deferred;         // freed, but recorded streams still had work
  uint64_t serials = 0;
  std::vector<int64_t> held = std::vector<int64_t>(max_devices, 0);
};

Heap& heap() {
  static auto* const heap = new Heap;
  return *heap;
}

bool is_small(size_t bytes) { return bytes <= small_request; }

Block* merge(Block* block, Pool& pool) {
  const auto absorb = [](Block* left, Block* right) {
    left->size += right->size;
    left->used_before |= right->used_before;
    left->next = right->next;
    if (right->next) right->next->previous = left;
    delete right;
  };
  if (Block* left = block->previous; left && left->free && left->stream == block->stream) {
    pool.free.erase(left);
    absorb(left, block);
    block = left;
  }
  if (Block* right = block->next; right && right->free && right->stream == block->stream) {
    pool.free.erase(right);
    absorb(block, right);
  }
  return block;
}

void put_back(Block* block) {
  Machine::get().names.drop(block->begin, block->begin + block->size);
  Pool& pool = heap().pools[block->stream];
  block->free = block->used_before = true;
  pool.free.insert(merge(block, pool));
}

void poison_and_put_back(Block* block) {
  static const Label operation = intern(freed_word);
  char* begin = block->begin;
  const size_t size = block->size;
  Machine::get().enqueue(block->stream, operation, {{begin, begin + size, true}},
                         [begin, size] { std::memset(begin, poison, size); });
  put_back(block);
}

// Blocks whose recorded streams have passed go to their pools; what those streams did to them is over.
void settle_deferred() {
  Machine& machine = Machine::get();
  std::erase_if(heap().deferred, [&](Block* block) {
    Clock over;
    for (const EventState& event : block->pending) {
      if (!machine.passed(event)) return false;
      over.join(event.clock);
    }
    machine.shadow.forget(block->begin, block->begin + block->size, over);
    block->pending.clear();
    heap().pools[block->stream].returned.push_back(block);
    return true;
  });
}

void free_block(void* context) {
  if (!context) return;
  const auto lock = Machine::lock();
  auto* block = static_cast<Block*>(context);
  Machine& machine = Machine::get();
  heap().held[block->device] -= static_cast<int64_t>(block->size);
  if (block->recorded.empty()) {
    heap().pools[block->stream].returned.push_back(block);
    return;
  }
  for (const int stream : block->recorded) block->pending.push_back(machine.record(stream));
  block->recorded.clear();
  heap().deferred.push_back(block);
}

Block* new_segment(int device, int stream, size_t bytes) {
  const size_t size = is_small(bytes) ? small_segment : (bytes + small_segment - 1) / small_segment * small_segment;
  char* memory = nullptr;
  if (const auto spare = heap().spares.find(size); spare != heap().spares.end()) {
    memory = spare->second;
    heap().spares.erase(spare);
  } else {
    memory = static_cast<char*>(std::aligned_alloc(granule, size));
    if (!memory)
      throw Error("out of memory: the simulated accelerator asked the host for " + std::to_string(size) + " bytes");
    std::memset(memory, poison, size);
  }
  auto* block = new Block;
  block->begin = memory;
  block->size = size;
  block->serial = ++heap().serials;
  block->device = device;
  block->stream = stream;
  block->free = true;
  heap().segments[memory] = block;
  heap().pools[stream].free.insert(block);
  return block;
}

Block* take(int device, int stream, size_t bytes) {
  Pool& pool = heap().pools[stream];
  Block probe;
  probe.size = bytes;
  auto found = pool.free.lower_bound(&probe);
  // Small requests do not nibble at large segments.
  if (found == pool.free.end() || (is_small(bytes) && (*found)->size > small_segment)) {
    found = pool.free.find(new_segment(device, stream, bytes));
  }
  Block* block = *found;
  pool.free.erase(found);
  const size_t rest = block->size - bytes;
  if (rest >= (is_small(bytes) ? granule : small_request)) {
    auto* tail = new Block(*block);
    tail->begin += bytes;
    tail->size = rest;
    tail->serial = ++heap().serials;
    tail->previous = block;
    if (tail->next) tail->next->previous = tail;
    block->next = tail;
    block->size = bytes;
    pool.free.insert(tail);
  }
  block->free = false;
  return block;
}

class SimAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(place().device, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator* allocator() {
  static auto* const allocator = new SimAllocator;
  return allocator;
}

c10::DataPtr allocate_on(int device, size_t bytes) {
  const c10::Device where(device_type, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) return {nullptr, nullptr, &free_block, where};
  const auto lock = Machine::lock();
  Machine& machine = Machine::get();
  const int stream = current_id(device);
  settle_deferred();
  for (Block* block : std::exchange(heap().pools[stream].returned, {})) poison_and_put_back(block);
  Block* block = take(device, stream, (bytes + granule - 1) / granule * granule);
  block->scope = current_scope();
  static const Label operation = intern("allocate");
  machine.note(stream, operation, {block->begin, block->begin + block->size, true});
  ++machine.statistics.allocations;
  machine.statistics.reuses += block->used_before;
  auto& held = heap().held[device];
  held += static_cast<int64_t>(block->size);
  machine.statistics.peak_bytes[device] = std::max(machine.statistics.peak_bytes[device], held);
  return {block->begin, block, &free_block, where};
}

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (memory.get_deleter() != &free_block || !memory.get_context()) return;
  const auto lock = Machine::lock();
  auto* block = static_cast<Block*>(memory.get_context());
  const int user = Machine::get().id_of(stream);
  if (user != block->stream) block->recorded.insert(user);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const int device = impl->device().index();
  auto fresh = allocate_on(device, bytes);
  auto* to = static_cast<char*>(fresh.get());
  auto* from = static_cast<char*>(impl->mutable_data());
  if (const size_t kept = std::min(impl->nbytes(), bytes)) {
    const auto lock = Machine::lock();
    static const Label operation = intern("resize_storage");
    Machine::get().enqueue(current_id(device), operation, {{from, from + kept, false}, {to, to + kept, true}},
                           [=] { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

std::pair<std::string, char*> describe_memory(char* at) {
  auto it = heap().segments.upper_bound(at);
  const Block* owner = nullptr;
  if (it != heap().segments.begin()) {
    for (owner = std::prev(it)->second; owner && at >= owner->begin + owner->size; owner = owner->next) {
    }
  }
  const auto [name, start] = Machine::get().names.find(at, owner ? owner->begin : nullptr);
  if (!name.empty()) return {"'" + name + "'", start};
  if (!owner) return {"host memory", at};
  std::string text = "unnamed memory of " + std::to_string(owner->size) + " bytes";
  if (owner->scope) text += " allocated in " + text_of(owner->scope);
  return {text, owner->begin};
}

void reset_allocator() {
  Heap& all = heap();
  std::vector<Block*> freed = std::exchange(all.deferred, {});
  for (auto& [stream, pool] : all.pools) freed.insert(freed.end(), pool.returned.begin(), pool.returned.end());
  all.pools.clear();
  for (const auto& [begin, first] : all.segments) {
    for (Block* block = first; block; block = block->next) {
      block->stream = Machine::get().id_of(block->device, 0);
      block->recorded.clear();
      if (block->free) all.pools[block->stream].free.insert(block);
    }
  }
  for (Block* block : freed) {
    std::memset(block->begin, poison, block->size);
    block->pending.clear();
    put_back(block);
  }
  std::erase_if(all.segments, [&](const auto& segment) {
    Block* block = segment.second;
    if (!block->free || block->next) return false;
    all.pools[block->stream].free.erase(block);
    all.spares.emplace(block->size, block->begin);
    delete block;
    return true;
  });
  for (auto& held : all.held) held = 0;
  for (const auto& [begin, first] : all.segments) {
    for (Block* block = first; block; block = block->next) {
      if (!block->free) all.held[block->device] += static_cast<int64_t>(block->size);
    }
  }
}

}  // namespace plumb::sim

// Device memory: one pool per stream, reused at once, split and merged as the CUDA caching allocator does, poisoned.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <string>
#include <utility>

namespace plumb::sim {

// What reports call the moment memory goes back to its pool.
inline constexpr const char* freed_word = "free";

c10::Allocator* allocator();
c10::DataPtr allocate_on(int device, size_t bytes);
// The memory is not reused before `stream` has passed the point it has reached when the tensor is freed.
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);
// Moves a storage to memory of another size, in stream order.
void resize_storage(const c10::Storage& storage, size_t bytes);

// What reports call the memory at `at`, and where that begins. The machine's lock is held.
std::pair<std::string, char*> describe_memory(char* at);

// Forgets the order of the session that ends: everything has run. The machine's lock is held.
void reset_allocator();

}  // namespace plumb::sim

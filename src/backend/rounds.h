// Rounds: messages that follow upon each other, by what carries a collective. The one formula of what is counted, shaped and
// predicted.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace plumb {

// Passed on from neighbour to neighbour, as rings do it; sent by each to each; or read in everybody's memory.
enum class Carriage { ring, direct, memory };

inline Carriage carriage_of(std::string_view backend) {
  if (backend == "shm" || backend == "shm+tcp") return Carriage::memory;
  return backend == "tcp" ? Carriage::direct : Carriage::ring;
}

// Of a collective in which every part goes around so many times: twice in an all-reduce, once in a reduce-scatter and in an
// all-gather.
inline int64_t rounds_around(Carriage carriage, int64_t times, int64_t ranks) {
  if (ranks < 2) return 0;
  if (carriage == Carriage::memory) return 1;
  return carriage == Carriage::ring ? times * (ranks - 1) : times;
}

// Of a tree: a broadcast, a barrier.
inline int64_t rounds_of_tree(int64_t ranks) {
  return ranks < 2 ? 0 : static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(ranks - 1)));
}

// Of a host message that is combined on the way, on the rank that takes part in most of them.
inline int64_t rounds_of_control(int64_t ranks) {
  if (ranks < 2) return 0;
  const auto count = static_cast<uint64_t>(ranks);
  return static_cast<int64_t>(std::bit_width(count)) - 1 + (std::has_single_bit(count) ? 0 : 2);
}

}  // namespace plumb

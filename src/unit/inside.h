// Sharded parameters inside of compiled graphs: the operators plumb::unit and plumb::gather (inside.cpp).
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace plumb::inside {

// Memory of whole parameters that a graph has: it lives as long as tensors over it, and is counted.
class Handed {
 public:
  Handed(c10::DataPtr memory, int64_t bytes, std::shared_ptr<std::atomic<int64_t>> of_engine);
  ~Handed();
  Handed(const Handed&) = delete;
  Handed& operator=(const Handed&) = delete;
  char* data() const { return static_cast<char*>(memory_.get()); }

 private:
  c10::DataPtr memory_;
  int64_t bytes_;
  std::shared_ptr<std::atomic<int64_t>> of_engine_;
};

// In this process: gathers by graphs, bytes of whole parameters that graphs have, the most they had since `forget_most`, and how
// many buckets were whole or on their way when a graph asked for them.
struct Counts {
  int64_t gathers = 0;
  int64_t bytes = 0;
  int64_t most_bytes = 0;
  int64_t ahead = 0;
};
Counts counts();
void forget_most();

}  // namespace plumb::inside

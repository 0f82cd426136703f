// Vector clocks: which operations of which streams are known to have happened.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace plumb::sim {

struct Promise;

// The clock of one stream, event or host. Besides the operations known by number it may hold promises: what a collective
// will have ordered once its last rank has enqueued it.
class Clock {
 public:
  // Counts one more operation of `stream` and returns its number.
  uint32_t tick(int stream);
  uint32_t now(int stream) const;
  void join(const Clock& other);
  void join(const std::shared_ptr<Promise>& promise);
  // Whether operation `number` of `stream` happened before whoever holds this clock.
  bool covers(int stream, uint32_t number) const;
  void clear();

 private:
  void settle() const;

  mutable std::vector<uint32_t> known_;
  mutable std::vector<std::shared_ptr<Promise>> promised_;
};

struct Promise {
  bool kept = false;
  Clock clock;
};

}  // namespace plumb::sim

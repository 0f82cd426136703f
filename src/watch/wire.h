// The wire: what one rank's communication costs, counted by kind, and for tests a link that is slower than the real one.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace plumb {

// Gradients and updated parameters; small host messages; parameters gathered by messages; the store that ranks met at.
enum class Cargo { data, control, gather, store };

class Wire {
 public:
  static constexpr int kinds = 4;

  // So far, on this rank. `rounds`: messages that follow upon each other. `waits`: times that the host waited for one of this
  // kind; `blocked`: of these, those that it did not find ended already.
  struct Count {
    int64_t rounds = 0;
    int64_t messages = 0;
    int64_t bytes = 0;  // sent
    int64_t waits = 0;
    int64_t blocked = 0;
    Count operator-(const Count& before) const;
  };
  using Counts = std::array<Count, kinds>;

  // Slower by PLUMB_SHAPE ("latency=1ms,gbps=10"), if it is set. Throws Error where that cannot be read.
  Wire();

  void sent(Cargo cargo, int64_t rounds, int64_t messages, int64_t bytes);
  void waited(Cargo cargo, bool blocked);
  Counts counts() const;

  // Whether the link is made slower; ranks then share no memory, as if each had a machine of its own.
  bool shaped() const { return latency_.count() > 0 || seconds_per_byte_ > 0; }
  // When what begins now, so many rounds and bytes, has arrived over that link; bytes take turns on it.
  using Moment = std::chrono::steady_clock::time_point;
  Moment arrival(int64_t rounds, int64_t bytes);

 private:
  struct Counters {
    std::atomic<int64_t> rounds{0}, messages{0}, bytes{0}, waits{0}, blocked{0};
  };
  std::array<Counters, kinds> counters_;
  std::chrono::nanoseconds latency_{0};
  double seconds_per_byte_ = 0;
  std::mutex mutex_;
  Moment free_{};  // when the link has sent what it was given
};

class World;
// Of this rank in this world.
Wire::Counts wire_counts(const World& world);

// What `text` ("latency=1ms,gbps=10", either or both) says. Throws Error that names what cannot be read.
struct Shape {
  std::chrono::nanoseconds latency{0};
  double gbps = 0;  // 0: as fast as the real one
};
Shape read_shape(const std::string& text);

}  // namespace plumb

// Lanes: a stream with the events that order it after others. The only place that touches streams and events.
// On the CPU there is one lane, and everything here does nothing.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <vector>

namespace plumb {

// The lanes that wrote some memory, each with the point after its last write.
class Producers {
 public:
  // The current stream of `device` has just enqueued a write.
  void wrote(c10::Device device);
  // Whatever the current stream of `device` does from here on comes after every write noted so far.
  void join(c10::Device device);
  void clear() { lanes_.clear(); }

 private:
  struct Lane {
    c10::Stream stream;
    c10::Event event;
  };
  std::vector<Lane> lanes_;
};

}  // namespace plumb

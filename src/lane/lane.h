// Lanes: streams with the events that order them after others. The only place that touches streams and events, through
// c10's device guard, so that every device takes the same road. On the CPU there is one lane, and everything here does
// nothing.
//
// Some memory (a bucket, a gathered unit) keeps the lanes that used it. A use is either of a part, beside others that do
// not disturb it (producers of a bucket, readers of gathered parameters), or of all of it, alone (the reduction, the
// update, the gather). A part waits for the last use of all of it; a use of all waits for everybody. A part may have a
// name, its place: then it also waits for the last use of the same place, and of no other (producers of one gradient).
// Waiting is between streams: the host never blocks.
//
// While a graph is captured, lanes that take part in it wait for each other inside the graph. What ran before on a lane
// that does not take part has ended: whoever captures, or replays, sees to that.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace plumb {

// A set of lanes, each with the point up to which others may have to wait for it.
class LaneSet {
 public:
  // The current stream of `device` belongs to it, with everything enqueued there up to the next join.
  void add(c10::Device device);
  // Whatever the current stream of `device` does from here on comes after what these lanes were given so far.
  void join(c10::Device device);
  // The same for one of them alone, if it is one of them.
  void join(c10::Device device, const c10::Stream& other);
  // The other way round: whatever these lanes are given from here on comes after the current stream's work so far.
  void follow(c10::Device device);
  // The memory goes back to its allocator no sooner than these lanes have passed what they were given before that.
  void keep(const c10::DataPtr& memory) const;
  void clear() { lanes_.clear(); }

 private:
  // The event is recorded when somebody waits: after the last write, whenever that was, and never for a lane that only
  // follows itself.
  struct Lane {
    c10::Stream stream;
    c10::Event event;
    bool recorded = false;
    uint64_t graph = 0;  // the event is of this graph's capture; 0: it was really recorded
  };
  static void wait(const c10::Stream& stream, Lane& lane);

  std::vector<Lane> lanes_;
};

// Who uses some memory. Calls come in pairs around what the current stream of `device` enqueues.
class Lanes {
 public:
  void begin_part(c10::Device device);
  void end_part(c10::Device device);
  void begin_part(c10::Device device, int place);
  void end_part(c10::Device device, int place);
  void begin_all(c10::Device device);
  void end_all(c10::Device device);
  // Memory that belongs to it is about to be freed or replaced, on whatever stream that happens.
  void keep(const c10::DataPtr& memory) const;

 private:
  LaneSet all_;                                // the last use of all
  LaneSet parts_;                              // since then
  std::unordered_map<int, c10::Stream> last_;  // of those, who used each place last
};

// A use of all of it, from here to the end of the scope.
class Alone {
 public:
  Alone(Lanes& lanes, c10::Device device) : lanes_(lanes), device_(device) { lanes_.begin_all(device_); }
  ~Alone() { lanes_.end_all(device_); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  Lanes& lanes_;
  c10::Device device_;
};

c10::Stream current_stream(c10::Device device);

// Whether what the current stream of `device` is given is captured into a graph instead of run.
bool capturing(c10::Device device);
// For tests on devices that cannot capture: who says instead which graph a stream is captured into (0: none). Null takes
// it away.
using GraphOf = uint64_t (*)(const c10::Stream& stream);
void ask_about_graphs(GraphOf graph_of);

// The current stream has just been given work on this tensor, which is somebody else's (autograd's, the user's) or was
// made under another stream: if it is freed before that work ran, its memory stays until then.
void keep_for_current(const at::Tensor& tensor);

}  // namespace plumb

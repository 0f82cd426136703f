// A trace: what every rank did when, as Perfetto (https://ui.perfetto.dev) and chrome://tracing show it, and where the time
// of a step went.
//
//   plumb::Trace trace = engine.trace("steps.json");
//   for (…) { …; engine.step(); }
//   const std::vector<plumb::TimeSpent> spent = trace.stop();  // of every rank
#pragma once

#include <plumb/world.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace plumb {

// Where the time of one rank went, in seconds per step.
struct TimeSpent {
  int64_t steps = 0;                 // that ended meanwhile
  double step = 0;                   // all of it: the sum of the next five
  double compute = 0;                // the program's own, forwards and backwards, and the engine's work on gradients
  double data = 0;                   // waits for gradients and for updated parameters
  double gathers = 0;                // waits for the parameters of units
  double control = 0;                // waits for host messages
  double optimizer = 0;              // the update itself
  std::vector<double> waited_for{};  // of these waits, by rank: until it came too, the last one of all
};

class Trace {
 public:
  // From now on. Collective: an Error on every rank where rank 0 cannot write to `path`.
  Trace(World world, std::string path);
  // Where stop() was not called, since something failed, nothing is written.
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Until now: rank 0 writes the file. Every rank's account, in rank order. Collective; the second time it only tells again.
  std::vector<TimeSpent> stop();

 private:
  const World world_;
  const std::string path_;
  const std::chrono::steady_clock::time_point begun_;
  bool made_ = false;  // the file, here and now
  bool on_ = false;
  std::vector<TimeSpent> spent_;
};

}  // namespace plumb

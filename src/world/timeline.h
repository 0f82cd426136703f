// The timeline of one rank: what it did when, for a trace that people look at. Off, it costs one load per event.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "plumb/world.h"

namespace plumb {

class Timeline {
 public:
  using Moment = std::chrono::steady_clock::time_point;

  void start() { on_.store(true, std::memory_order_relaxed); }
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // `track`: what kind of thing it is; each is a row of the picture.
  void span(const char* track, const std::string& name, Moment begin, Moment end = std::chrono::steady_clock::now());
  void mark(const char* track, const std::string& name);  // a moment

  // From its construction to its end; names are made only while the timeline is on.
  class Scope {
   public:
    template <class Name>
    Scope(Timeline& timeline, const char* track, const Name& name) : timeline_(timeline), track_(track) {
      if (!timeline_.on()) return;
      name_ = name();
      begin_ = std::chrono::steady_clock::now();
    }
    ~Scope() {
      if (begin_ != Moment{}) timeline_.span(track_, name_, begin_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Timeline& timeline_;
    const char* track_;
    std::string name_;
    Moment begin_{};
  };

  struct Event {
    const char* track;
    std::string name;
    Moment begin, end;
  };
  std::vector<Event> events() const;

 private:
  std::atomic<bool> on_{false};
  mutable std::mutex mutex_;
  std::vector<Event> events_;
};

Timeline& timeline_of(const World& world);

// Every rank's timeline, from `origin` on, as the JSON that Perfetto and chrome://tracing read; on rank 0, empty elsewhere.
// One clock: ranks leave a barrier together, which tells their clocks apart to within a message. Collective.
std::string trace_of(const World& world, Timeline::Moment origin);

}  // namespace plumb

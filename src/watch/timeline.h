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

  // On from the first start() to the last stop(), which forgets everything.
  void start();
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed) > 0; }

  // `track`: what kind of thing it is; each is a row of the picture.
  void span(const char* track, const std::string& name, Moment begin, Moment end = std::chrono::steady_clock::now());
  void mark(const char* track, const std::string& name);  // a moment
  // The row "program": what the program is at since `begin`. It is always at something; once it is at the next, that is a
  // span. Of several engines at the same thing, the first counts.
  void enter(const char* what, Moment begin);
  void enter(const char* what) {
    if (on()) enter(what, std::chrono::steady_clock::now());
  }

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
  std::atomic<int> on_{0};
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Event> events_;
  const char* doing_ = "";
  Moment since_{};
};

// The rows that somebody reads again.
namespace tracks {
constexpr const char* program = "program";
constexpr const char* steps = "steps";  // a mark where each has ended
constexpr const char* buckets = "buckets";
constexpr const char* data = "wait for data";
constexpr const char* gathers = "wait for gathers";
constexpr const char* control = "control";
}  // namespace tracks

// What a program is at, by itself.
namespace doing {
constexpr const char* forward = "forward";  // and whatever else is done between backwards and steps
constexpr const char* backward = "backward";
constexpr const char* step = "step";
constexpr const char* optimizer = "optimizer";
}  // namespace doing

Timeline& timeline_of(const World& world);

}  // namespace plumb

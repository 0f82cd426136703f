#include "watch/timeline.h"

#include <algorithm>
#include <cstring>

namespace plumb {

void Timeline::start() {
  std::lock_guard lock(mutex_);
  if (on_.fetch_add(1, std::memory_order_relaxed) > 0) return;
  doing_ = doing::forward;
  since_ = std::chrono::steady_clock::now();
}

void Timeline::stop() {
  std::lock_guard lock(mutex_);
  if (on_.fetch_sub(1, std::memory_order_relaxed) == 1) events_.clear();
}

void Timeline::span(const char* track, const std::string& name, Moment begin, Moment end) {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  events_.push_back({track, name, begin, end});
}

void Timeline::mark(const char* track, const std::string& name) {
  if (!on()) return;
  const Moment now = std::chrono::steady_clock::now();
  span(track, name, now, now);
}

void Timeline::enter(const char* what, Moment begin) {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  if (std::strcmp(what, doing_) == 0) return;
  if (begin > since_) events_.push_back({tracks::program, doing_, since_, begin});
  doing_ = what;
  since_ = std::max(since_, begin);
}

std::vector<Timeline::Event> Timeline::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

}  // namespace plumb

// Vector clocks with promises.
#include "sim/clock.h"

#include <algorithm>

namespace plumb::sim {

uint32_t Clock::tick(int stream) {
  if (known_.size() <= static_cast<size_t>(stream)) known_.resize(stream + 1);
  return ++known_[stream];
}

uint32_t Clock::now(int stream) const { return static_cast<size_t>(stream) < known_.size() ? known_[stream] : 0; }

void Clock::join(const Clock& other) {
  other.settle();  // there and not only here: whoever joins it next finds it flat, and walks no path twice
  if (known_.size() < other.known_.size()) known_.resize(other.known_.size());
  for (size_t i = 0; i < other.known_.size(); ++i) known_[i] = std::max(known_[i], other.known_[i]);
  for (const auto& promise : other.promised_) join(promise);
}

void Clock::join(const std::shared_ptr<Promise>& promise) {
  settle();
  if (promise->kept) {
    join(promise->clock);
  } else if (std::find(promised_.begin(), promised_.end(), promise) == promised_.end()) {
    promised_.push_back(promise);
  }
}

bool Clock::covers(int stream, uint32_t number) const {
  if (now(stream) >= number) return true;
  if (promised_.empty()) return false;
  settle();
  return now(stream) >= number;
}

void Clock::settle() const {
  if (promised_.empty()) return;
  std::vector<std::shared_ptr<Promise>> kept;
  std::erase_if(promised_, [&](const auto& promise) {
    if (promise->kept) kept.push_back(promise);
    return promise->kept;
  });
  for (const auto& promise : kept) const_cast<Clock*>(this)->join(promise->clock);
}

void Clock::clear() {
  known_.clear();
  promised_.clear();
}

}  // namespace plumb::sim

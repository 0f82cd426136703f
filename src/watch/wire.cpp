#include "watch/wire.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "plumb/error.h"

namespace plumb {
namespace {

Error unreadable(const std::string& text, const std::string& why) {
  return Error("the shape '" + text + "' of the link " + why +
               "; write latency=1ms (or us, s) and gbps=10, one of them or both, with a comma between");
}

constexpr double kSlowest = 1e-4;  // Gbit/s: 100 kbit/s, slower than any link that gradients travel on

}  // namespace

Shape read_shape(const std::string& text) {
  Shape shape;
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    const size_t equal = item.find('=');
    const std::string name = item.substr(0, equal);
    const std::string value = equal == std::string::npos ? "" : item.substr(equal + 1);
    double number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc{} || !std::isfinite(number) || number < 0) {
      throw unreadable(text, "has no number in '" + item + "'");
    }
    const std::string unit(end, value.data() + value.size());
    if (name == "latency") {
      const double ns = unit == "s" ? 1e9 : unit == "ms" ? 1e6 : unit == "us" ? 1e3 : -1;
      if (ns < 0 || number * ns > 1e11) throw unreadable(text, "has the latency '" + value + "'");
      shape.latency = std::chrono::nanoseconds(std::llround(number * ns));
    } else if (name == "gbps" && unit.empty() && number >= kSlowest) {
      shape.gbps = number;
    } else {
      throw unreadable(text, "has '" + item + "'");
    }
  }
  return shape;
}

Wire::Count Wire::Count::operator-(const Count& before) const {
  return {rounds - before.rounds, messages - before.messages, bytes - before.bytes, waits - before.waits,
          blocked - before.blocked};
}

Wire::Wire() {
  const char* text = std::getenv("PLUMB_SHAPE");
  if (text == nullptr || *text == 0) return;
  const Shape shape = read_shape(text);
  latency_ = shape.latency;
  if (shape.gbps > 0) seconds_per_byte_ = 8 / (shape.gbps * 1e9);
}

void Wire::sent(Cargo cargo, int64_t rounds, int64_t messages, int64_t bytes) {
  Counters& counters = counters_[static_cast<size_t>(cargo)];
  counters.rounds += rounds;
  counters.messages += messages;
  counters.bytes += bytes;
}

void Wire::waited(Cargo cargo, bool blocked) {
  Counters& counters = counters_[static_cast<size_t>(cargo)];
  ++counters.waits;
  if (blocked) ++counters.blocked;
}

Wire::Counts Wire::counts() const {
  Counts counts;
  for (size_t kind = 0; kind < counters_.size(); ++kind) {
    const Counters& from = counters_[kind];
    counts[kind] = {from.rounds.load(), from.messages.load(), from.bytes.load(), from.waits.load(),
                    from.blocked.load()};
  }
  return counts;
}

Wire::Moment Wire::arrival(int64_t rounds, int64_t bytes) {
  const Moment now = std::chrono::steady_clock::now();
  if (!shaped()) return now;
  const auto duration = std::chrono::duration<double>(static_cast<double>(bytes) * seconds_per_byte_);
  std::lock_guard lock(mutex_);
  free_ = std::max(free_, now) + std::chrono::duration_cast<std::chrono::nanoseconds>(duration);
  return free_ + rounds * latency_;
}

}  // namespace plumb

#include "watch/strike.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string_view>

#include "plumb/error.h"

namespace plumb {
namespace {

constexpr std::array<std::string_view, 5> kKinds = {"none", "kill", "stop", "throw", "flip"};  // as in Strike::Kind

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw Error(
      "PLUMB_FAULT is '" + text + "': " + why +
      "; write it as rank=1,point=gather:3,kind=kill (or stop, throw, flip), with ';' between the strikes of a run's "
      "lives");
}

int64_t number_in(const std::string& text, const std::string& digits, int64_t least) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size() || number < least) {
    refuse(text, "'" + digits + "' is no number from " + std::to_string(least) + " on");
  }
  return number;
}

Point point_in(const std::string& text, const std::string& name) {
  std::string all;
  for (int i = 1; i < kPoints; ++i) {
    const auto point = static_cast<Point>(i);
    if (name == name_of(point)) return point;
    all += (all.empty() ? "" : ", ") + std::string(name_of(point));
  }
  refuse(text, "there is no point '" + name + "', but " + all);
}

Strike read_strike(const std::string& text, const std::string& part) {
  Strike strike;
  bool rank = false;
  std::istringstream fields(part);
  for (std::string field; std::getline(fields, field, ',');) {
    const size_t equals = field.find('=');
    const std::string name = field.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : field.substr(equals + 1);
    if (name == "rank") {
      strike.rank = static_cast<int>(number_in(text, value, 0));
      rank = true;
    } else if (name == "point") {
      const size_t colon = value.find(':');
      strike.point = point_in(text, value.substr(0, colon));
      if (colon != std::string::npos) strike.number = number_in(text, value.substr(colon + 1), 1);
    } else if (const auto kind = std::ranges::find(kKinds, value); name == "kind" && kind != kKinds.end()) {
      strike.kind = static_cast<Strike::Kind>(kind - kKinds.begin());
    } else {
      refuse(text, "'" + field + "' says nothing");
    }
  }
  if (!rank || strike.point == Point::none || strike.kind == Strike::Kind::none) {
    refuse(text, "rank, point and kind are needed");
  }
  if (strike.kind == Strike::Kind::flip && strike.point != Point::hook && strike.point != Point::publish) {
    refuse(text, "a bit can be flipped at hook and publish");
  }
  return strike;
}

std::mutex mutex;
std::string armed_text;  // PLUMB_FAULT as it was read
Strike ours;
std::atomic<int64_t> passed{0};
std::atomic<bool> flip{false};

}  // namespace

std::atomic<bool> strikes::armed{false};

std::vector<Strike> read_strikes(const std::string& text) {
  std::vector<Strike> all;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ';');) {
    all.push_back(part.empty() ? Strike{} : read_strike(text, part));
  }
  return all;
}

int64_t restarts_before() {
  for (const char* name : {kRestarted, "TORCHELASTIC_RESTART_COUNT"}) {
    if (const char* text = std::getenv(name)) return std::strtoll(text, nullptr, 10);  // torchrun's, or ours
  }
  return 0;
}

void arm_strike() {
  const char* variable = std::getenv("PLUMB_FAULT");
  const std::string text = variable == nullptr ? "" : variable;
  std::lock_guard lock(mutex);
  if (text == armed_text) return;
  const std::vector<Strike> all = read_strikes(text);
  const auto life = static_cast<size_t>(restarts_before());
  armed_text = text;
  ours = life < all.size() ? all[life] : Strike{};
  passed = 0;
  strikes::armed = ours.kind != Strike::Kind::none;
}

bool strikes::flip_now(int rank, Point point) {
  return rank == ours.rank && point == ours.point && flip.exchange(false);
}

void flip_a_bit(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0 || tensor.storage().nbytes() == 0) return;
  // Of the mantissa, past everything that counts versions.
  static_cast<uint8_t*>(tensor.data_ptr())[tensor.element_size() / 2 - 1] ^= 0x40;
}

void strikes::look(int rank, Point point) {
  if (rank != ours.rank || point != ours.point || ++passed != ours.number) return;
  const std::string place = std::string(name_of(point)) + ":" + std::to_string(ours.number);
  const std::string line = "plumb: PLUMB_FAULT strikes rank " + std::to_string(rank) + " at " + place + ": " +
                           std::string(kKinds[static_cast<size_t>(ours.kind)]) + "\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
  if (ours.kind == Strike::Kind::raise) throw Error(rank, "PLUMB_FAULT asked for an error at " + place);
  if (ours.kind == Strike::Kind::flip) {
    flip = true;
    return;
  }
  raise(ours.kind == Strike::Kind::kill ? SIGKILL : SIGSTOP);
}

}  // namespace plumb

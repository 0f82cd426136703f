#include "world/strike.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <mutex>
#include <sstream>

#include "plumb/error.h"

namespace plumb {
namespace {

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw Error("PLUMB_FAULT is '" + text + "': " + why +
              "; write it as rank=1,point=gather:3,kind=kill (or stop, throw), with ';' between the strikes of a run's "
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
    } else if (name == "kind" && (value == "kill" || value == "stop" || value == "throw")) {
      strike.kind = value == "kill" ? Strike::Kind::kill : value == "stop" ? Strike::Kind::stop : Strike::Kind::raise;
    } else {
      refuse(text, "'" + field + "' says nothing");
    }
  }
  if (!rank || strike.point == Point::none || strike.kind == Strike::Kind::none) {
    refuse(text, "rank, point and kind are needed");
  }
  return strike;
}

std::mutex mutex;
std::string armed_text;  // PLUMB_FAULT as it was read
Strike ours;
std::atomic<int64_t> passed{0};

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
    if (const char* text = std::getenv(name)) return std::atoll(text);
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

void strikes::look(int rank, Point point) {
  if (rank != ours.rank || point != ours.point || ++passed != ours.number) return;
  constexpr const char* kinds[] = {"none", "kill", "stop", "throw"};
  const std::string place = std::string(name_of(point)) + ":" + std::to_string(ours.number);
  const std::string line = "plumb: PLUMB_FAULT strikes rank " + std::to_string(rank) + " at " + place + ": " +
                           kinds[static_cast<int>(ours.kind)] + "\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
  if (ours.kind == Strike::Kind::raise) throw Error(rank, "PLUMB_FAULT asked for an error at " + place);
  raise(ours.kind == Strike::Kind::kill ? SIGKILL : SIGSTOP);
}

}  // namespace plumb

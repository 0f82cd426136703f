// Steps as text and as JSON.
#include "report/run.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace plumb::report {

namespace {

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char buffer[256];
  std::snprintf(buffer, sizeof(buffer), pattern, values...);
  return buffer;
}

}  // namespace

nlohmann::ordered_json to_json(const Step& s) {
  nlohmann::ordered_json json = {{"step", s.step},
                                 {"loss", s.loss},
                                 {"grad_norm", s.grad_norm},
                                 {"lr", s.lr},
                                 {"ms", s.ms},
                                 {"tokens_per_s", s.tokens_per_s},
                                 {"rss_bytes", s.rss_bytes}};
  if (s.skipped) json["skipped"] = true;
  if (s.accuracy) json["accuracy"] = *s.accuracy;
  return json;
}

std::optional<Step> step_of(const std::string& line) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) return std::nullopt;
  const auto number = [&](const char* name, double otherwise) {
    return json.contains(name) && json[name].is_number() ? json[name].get<double>() : otherwise;
  };
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  Step step;
  step.step = json["step"];
  step.loss = number("loss", kNone);
  step.skipped = json.contains("skipped");
  step.grad_norm = number("grad_norm", step.skipped ? std::numeric_limits<double>::infinity() : kNone);
  step.lr = number("lr", 0);
  step.ms = number("ms", 0);
  step.tokens_per_s = number("tokens_per_s", 0);
  if (json.contains("rss_bytes") && json["rss_bytes"].is_array()) {
    for (const auto& bytes : json["rss_bytes"]) {
      if (bytes.is_number_integer()) step.rss_bytes.push_back(bytes);
    }
  }
  if (json.contains("accuracy") && json["accuracy"].is_number()) step.accuracy = json["accuracy"].get<double>();
  return step;
}

std::string line(const Step& s, int64_t steps) {
  const auto width = static_cast<int>(std::to_string(steps).size());
  const int64_t memory = s.rss_bytes.empty() ? 0 : *std::max_element(s.rss_bytes.begin(), s.rss_bytes.end());
  std::string text = format("step %*lld/%lld  loss %.5f  norm %7.4f  %7.1f ms  %s tokens/s  %s", width,
                            static_cast<long long>(s.step), static_cast<long long>(steps), s.loss, s.grad_norm, s.ms,
                            human_count(std::llround(s.tokens_per_s)).c_str(), human_bytes(memory).c_str());
  if (s.skipped) text += "  skipped: a gradient was not finite";
  if (s.accuracy) text += format("  accuracy %.1f %%", 100.0 * *s.accuracy);
  return text;
}

std::string human_bytes(int64_t bytes) {
  const double mb = static_cast<double>(bytes) / 1e6;
  return mb < 1000 ? format("%.0f MB", mb) : format("%.2f GB", mb / 1e3);
}

std::string human_count(int64_t count) {
  std::string digits = std::to_string(count);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > (count < 0 ? 1 : 0); i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

std::string human_time(double seconds) {
  if (seconds < 59.95) return format("%.1f s", seconds);
  const auto whole = std::llround(seconds);
  if (whole < 3600) return format("%lld min %02lld s", whole / 60, whole % 60);
  return format("%lld h %02lld min", whole / 3600, whole / 60 % 60);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2.0;
}

std::string one_line(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace plumb::report

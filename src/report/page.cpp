// Puts a run's numbers into the page.
#include "report/page.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "report/template.h"

namespace plumb::report {

namespace {

constexpr size_t kPoints = 1500;  // more than a screen is wide

// A long run is drawn in bins: means for what is noisy, the last value for what is a state.
nlohmann::ordered_json columns(const std::vector<Step>& steps) {
  const size_t bin = std::max<size_t>(1, (steps.size() + kPoints - 1) / kPoints);
  nlohmann::ordered_json step = nlohmann::json::array(), loss = step, norm = step, lr = step, ms = step;
  nlohmann::ordered_json accuracy = step, memory = step;
  if (!steps.empty()) memory.get_ref<nlohmann::ordered_json::array_t&>().resize(steps.front().rss_bytes.size(), step);
  for (size_t first = 0; first < steps.size(); first += bin) {
    const size_t end = std::min(steps.size(), first + bin);
    const auto mean = [&](auto field) {
      double sum = 0;
      for (size_t i = first; i < end; ++i) sum += steps[i].*field;
      const double value = sum / static_cast<double>(end - first);
      return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
    };
    const Step& last = steps[end - 1];
    step.push_back(last.step);
    loss.push_back(mean(&Step::loss));
    norm.push_back(mean(&Step::grad_norm));
    ms.push_back(mean(&Step::ms));
    lr.push_back(last.lr);
    for (size_t r = 0; r < memory.size() && r < last.rss_bytes.size(); ++r) memory[r].push_back(last.rss_bytes[r]);
    for (size_t i = first; i < end; ++i) {
      if (steps[i].accuracy) accuracy.push_back({steps[i].step, *steps[i].accuracy});
    }
  }
  return {{"bin", bin}, {"step", step}, {"loss", loss},         {"norm", norm},
          {"lr", lr},   {"ms", ms},     {"accuracy", accuracy}, {"memory", memory}};
}

}  // namespace

std::string page(const std::vector<Step>& steps, const nlohmann::ordered_json& summary) {
  std::string data = one_line({{"summary", summary}, {"columns", columns(steps)}});
  // Inside <script>, the only thing that can end the data early.
  for (size_t at = 0; (at = data.find("</", at)) != std::string::npos; at += 3) data.replace(at, 2, "<\\/");
  for (size_t at = 0; (at = data.find("<!--", at)) != std::string::npos; at += 4) data.replace(at, 4, "<\\u0021--");
  std::string html = kTemplate;
  const std::string mark = "@DATA@";
  html.replace(html.find(mark), mark.size(), data);
  return html;
}

}  // namespace plumb::report

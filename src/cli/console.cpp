// Printing, and nothing else.
#include "cli/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cli/output.h"

namespace plumb::cli {

namespace {

int columns() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// A byte string as one printable line.
std::string visible(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n')
      out += "⏎";
    else if (static_cast<unsigned char>(c) < 32 || c == 127)
      out += ' ';
    else
      out += c;
  }
  return out;
}

// JSON has no NaN: null stands for it.
double number(const nlohmann::ordered_json& value) { return value.is_null() ? std::nan("") : value.get<double>(); }

void row(const char* name, const std::string& value) { std::printf("  %-10s %s\n", name, value.c_str()); }

}  // namespace

Console::Console(const Settings& settings, bool speaks)
    : steps_(settings.steps), out_(settings.out), speaks_(speaks), json_(settings.json), quiet_(settings.quiet),
      terminal_(isatty(STDOUT_FILENO) != 0) {}

void Console::begin(const std::string& headline) {
  if (!speaks_ || json_ || quiet_) return;
  std::printf("%s\n", headline.c_str());
  flush_output();
}

void Console::step(const report::Step& step) {
  if (!speaks_ || quiet_) return;
  if (json_) {
    std::printf("%s\n", report::one_line(report::to_json(step)).c_str());
  } else if (terminal_) {
    bar(step);
  } else {
    std::printf("%s\n", report::line(step, steps_).c_str());
  }
  flush_output();
}

// One line that is rewritten; a step where accuracy was measured leaves its line behind.
void Console::bar(const report::Step& step) {
  ms_sum_ += step.ms;
  ++shown_;
  const int width = columns();
  std::printf("\r\x1b[K");
  if (step.accuracy) std::printf("%.*s\n", width, report::line(step, steps_).c_str());
  const double done = static_cast<double>(step.step) / static_cast<double>(steps_);
  const double left = ms_sum_ / static_cast<double>(shown_) * static_cast<double>(steps_ - step.step) / 1e3;
  std::string text = "  " + report::line(step, steps_) + "  " + report::human_time(left) + " left";
  constexpr int kBar = 20;
  // The bar is drawn in eighths of a cell.
  static const char* const kPart[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::lround(done * kBar * 8));
  std::string cells;
  for (int i = 0; i < eighths / 8; ++i) cells += "█";
  const int partial = eighths % 8;
  cells += kPart[partial];
  for (int i = eighths / 8 + (partial > 0 ? 1 : 0); i < kBar; ++i) cells += "·";
  const int room = width - kBar - 2;
  if (room > 0) std::printf("\x1b[36m%s\x1b[0m%.*s", cells.c_str(), room, text.c_str());
  if (step.step == steps_) std::printf("\r\x1b[K");
}

void Console::end(const nlohmann::ordered_json& s) {
  if (!speaks_) return;
  if (json_) {
    std::printf("%s\n", report::one_line(s).c_str());
    flush_output();
    return;
  }
  if (terminal_ && !quiet_) std::printf("\r\x1b[K");
  const auto ranks = s["ranks"].get<int64_t>();
  std::printf("\n%s %s steps in %s on %lld %s (%s, %s, %s): %s\n",
              s["stopped"].get<bool>() ? "stopped after" : "trained", report::human_count(s["steps"]).c_str(),
              report::human_time(s["seconds"]).c_str(), static_cast<long long>(ranks), ranks == 1 ? "rank" : "ranks",
              s["strategy"].get<std::string>().c_str(), s["backend"].get<std::string>().c_str(),
              s["dtype"].get<std::string>().c_str(), s["task"].get<std::string>().c_str());
  char text[160];
  std::snprintf(text, sizeof(text), "%.5f, from %.5f at the first step", number(s["loss"]), number(s["first_loss"]));
  row("loss", text);
  if (!s["accuracy"].is_null()) {
    std::snprintf(text, sizeof(text), "%.1f %% of %s %s, never trained on", 100.0 * s["accuracy"].get<double>(),
                  report::human_count(s["asked"]).c_str(), s["held_out"].get<std::string>().c_str());
    row("accuracy", text);
  }
  std::snprintf(text, sizeof(text), "%.1f ms (median), %s tokens/s", s["step_ms_median"].get<double>(),
                report::human_count(std::llround(s["tokens_per_s"].get<double>())).c_str());
  row("step", text);
  int64_t peak = 0;
  for (const auto& bytes : s["peak_rss_bytes"]) peak = std::max(peak, bytes.get<int64_t>());
  int64_t measured = 0;
  for (const auto& bytes : s["measured_bytes"]) measured = std::max(measured, bytes.get<int64_t>());
  row("memory", "predicted " + report::human_bytes(s["predicted_bytes"]["held"]) +
                    (s["measured_bytes"].is_null() ? "" : ", measured " + report::human_bytes(measured)) +
                    " of tensors per rank between steps");
  row("", report::human_bytes(peak) + " at most resident in a process");
  row("model", report::human_count(s["params"]) + " parameters, digest " + s["model_digest"].get<std::string>());
  const char* label = "samples";
  for (const auto& sample : s["samples"]) {
    const bool right = sample["right"];
    std::string said = visible(sample["prompt"]) + " " + visible(sample["output"]) + (right ? "  ✓" : "  ✗");
    if (!right && s["task"].get<std::string>().rfind("addition", 0) == 0) {
      said += "  (" + sample["expected"].get<std::string>() + ")";
    } else if (s["task"].get<std::string>().rfind("addition", 0) != 0) {
      said = visible(sample["prompt"]) + "│" + visible(sample["output"]);
    }
    row(label, said);
    label = "";
  }
  if (!out_.empty()) row("run", out_ + "/report.html (and log.jsonl)");
  flush_output();
}

}  // namespace plumb::cli

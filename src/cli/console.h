// What a person sees: a live bar on a terminal, plain lines in a pipe, JSON lines when asked, and the summary.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>

#include "cli/settings.h"
#include "report/run.h"

namespace plumb::cli {

class Console {
 public:
  // `steps` of the run; prints nothing when `speaks` is false (every rank but 0).
  Console(const Settings& settings, bool speaks);

  void begin(const std::string& headline);
  void step(const report::Step& step);
  // `summary` is the last JSON line.
  void end(const nlohmann::ordered_json& summary);

 private:
  void bar(const report::Step& step);

  int64_t steps_;
  std::string out_;
  bool speaks_, json_, quiet_, terminal_;
  double ms_sum_ = 0.0;
  int64_t shown_ = 0;  // steps, of this life of the run
};

}  // namespace plumb::cli

// What a run leaves behind: its steps and its summary, as values.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace plumb::report {

struct Step {
  int64_t step = 0;        // from 1
  double loss = 0.0;       // mean over the global batch
  double grad_norm = 0.0;  // before clipping; infinite if the step was skipped
  bool skipped = false;    // a gradient was not finite, and nothing was updated
  double lr = 0.0;
  double ms = 0.0;
  double tokens_per_s = 0.0;
  std::vector<int64_t> rss_bytes;  // per rank
  std::optional<double> accuracy;  // where it was measured after this step
};

nlohmann::ordered_json to_json(const Step& step);

// The step that a line of the log tells of; nothing where it tells of something else.
std::optional<Step> step_of(const std::string& line);

// The line as a trainer reads it: "step 12/1000  loss 0.1234 …".
std::string line(const Step& step, int64_t steps);

// "1.2 GB", "312 MB".
std::string human_bytes(int64_t bytes);
// "1,234,567".
std::string human_count(int64_t count);
// "1 min 24 s".
std::string human_time(double seconds);

double median(std::vector<double> values);

// One JSON value as one line; bytes that are no UTF-8 (samples of any file) become the replacement character.
std::string one_line(const nlohmann::ordered_json& value);

}  // namespace plumb::report

// `plumb estimate`: memory and messages of a run, without the run.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "cli/settings.h"
#include "layout/estimate.h"

namespace plumb::cli {

// Throws UsageError.
int estimate(const std::vector<std::string>& words);

// What `plumb train` with these settings will hold and send.
Plan plan_for(const Settings& settings, int64_t ranks);

nlohmann::ordered_json to_json(const Estimate& estimate);

}  // namespace plumb::cli

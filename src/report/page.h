// The run as one self-contained HTML page: no network, no other file.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "report/run.h"

namespace plumb::report {

// `summary` is the last line of log.jsonl.
std::string page(const std::vector<Step>& steps, const nlohmann::ordered_json& summary);

}  // namespace plumb::report

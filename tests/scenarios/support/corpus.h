// The corpus: what users do, as programs. One entry per row (or variant of a row) of the table in docs/scenarios.md.
#pragma once

#include <vector>

#include "scenarios/support/stage.h"

namespace plumb::scenarios {

std::vector<Scenario> accumulation_scenarios();  // A
std::vector<Scenario> graph_scenarios();         // G
std::vector<Scenario> number_scenarios();        // N
std::vector<Scenario> world_scenarios();         // W, those that must come out right
std::vector<Scenario> fused_scenarios();         // F

const std::vector<Scenario>& corpus();
const Scenario& scenario_called(const std::string& name);

}  // namespace plumb::scenarios

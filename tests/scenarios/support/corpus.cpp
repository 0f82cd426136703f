#include "scenarios/support/corpus.h"

namespace plumb::scenarios {

const std::vector<Scenario>& corpus() {
  static const std::vector<Scenario> all = [] {
    std::vector<Scenario> result;
    for (auto make : {accumulation_scenarios, graph_scenarios, number_scenarios, world_scenarios, fused_scenarios}) {
      for (auto& scenario : make()) result.push_back(std::move(scenario));
    }
    return result;
  }();
  return all;
}

const Scenario& scenario_called(const std::string& name) {
  for (const Scenario& scenario : corpus()) {
    if (scenario.name == name) return scenario;
  }
  throw Error("no scenario is called '" + name + "'");
}

}  // namespace plumb::scenarios

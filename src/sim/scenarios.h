// The engine's own stream scenarios, played on simulated devices under many seeds and compared with the CPU bit by bit.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plumb/engine.h"

namespace plumb::sim {

class Actor;

// What users do with streams: a program every rank plays.
struct Scenario {
  std::string id;    // of the table in docs/scenarios.md, where it is there
  std::string name;  // several-streams
  std::string what;  // one sentence
  Options options;
  Optimizer optimizer = AdamW{.lr = 1e-2};
  std::function<void(Actor&)> program;
  bool half = false;  // bf16 parameters
};

const std::vector<Scenario>& scenarios();
// The scenarios of that name or id, all for an empty one; an Error that lists the names when there is none.
std::vector<const Scenario*> scenarios_called(const std::string& name);

// What came out under all seeds.
struct Played {
  std::string scenario, strategy;
  int ranks = 0;
  uint64_t seeds = 0;
  size_t orders = 0;  // different orders of execution
  uint64_t operations = 0;
  uint64_t races = 0;         // reports, over all seeds
  uint64_t differences = 0;   // seeds whose result was not the CPU's, or that failed
  uint64_t device_waits = 0;  // times the engine, once it was made, had the host wait for a device
  uint64_t first_bad = 0;     // its seed
  std::string report;         // of that seed; empty when all went well
  double seconds = 0;

  bool good() const { return races == 0 && differences == 0; }
};

// How many ranks a strategy is played with: enough for both axes of its mesh.
int ranks_for(const std::string& strategy);

// Seeds `first` to `first + seeds`. Needs init(ranks_for(strategy)). Goes on after a bad seed unless it is the report
// alone that is wanted.
enum class After { stop, go_on };
Played play(const Scenario& scenario, const std::string& strategy, uint64_t first, uint64_t seeds,
            After bad = After::go_on);

}  // namespace plumb::sim

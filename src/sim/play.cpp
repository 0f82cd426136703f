// Plays a scenario under many seeds: races, orders, and the CPU's bits.
#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <set>

#include "sim/actor.h"
#include "sim/scenarios.h"

namespace plumb::sim {
namespace {

using Results = std::vector<at::Tensor>;  // by rank

std::string difference(const Results& expected, const Results& found) {
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const at::Tensor& a = expected[rank];
    const at::Tensor& b = found[rank];
    if (a.sizes() == b.sizes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) continue;
    const auto* x = a.const_data_ptr<float>();
    const auto* y = b.const_data_ptr<float>();
    int64_t i = 0;
    while (i < std::min(a.numel(), b.numel()) && std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i])) ++i;
    return "rank " + std::to_string(rank) + ": value " + std::to_string(i) + " of the results is not the CPU's";
  }
  return {};
}

// The same program and strategy on the CPU, its ranks threads over the `local` backend.
Results on_cpu(const Scenario& scenario, const std::string& strategy, int ranks) {
  Results results(ranks);
  run_local(ranks, [&](const World& world) {
    Actor actor(scenario, world, strategy, at::kCPU);
    scenario.program(actor);
    results[world.rank()] = actor.results();
  });
  return results;
}

}  // namespace

int ranks_for(const std::string& strategy) { return plumb::strategy(strategy).replicate > 1 ? 4 : 2; }

Played play(const Scenario& scenario, const std::string& strategy, uint64_t first, uint64_t seeds, After bad) {
  const auto begin = std::chrono::steady_clock::now();
  Played played{scenario.name, strategy, ranks_for(strategy)};
  const Results expected = on_cpu(scenario, strategy, played.ranks);
  std::set<uint64_t> orders;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    ++played.seeds;
    Session session(seed);
    Results found(played.ranks);
    uint64_t waits = ~uint64_t{0};
    std::string trouble;
    try {
      run_world(played.ranks, [&](const World& world) {
        const int rank = world.rank();
        Actor actor(scenario, world, strategy, device(rank));
        scenario.program(actor);
        waits = std::min(waits, actor.device_waits());  // of the first rank to end: then nobody has read results
        found[rank] = actor.results();
      });
      session.finish();
      trouble = difference(expected, found);
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    const uint64_t races = session.races().size();
    played.races += races;
    played.differences += !trouble.empty();
    if (trouble.empty()) played.device_waits += waits;
    orders.insert(session.statistics().order);
    played.operations += session.statistics().operations;
    if ((races > 0 || !trouble.empty()) && played.report.empty()) {
      played.first_bad = seed;
      played.report = session.report() + (trouble.empty() ? "" : trouble + "\n");
      if (bad == After::stop) break;
    }
  }
  played.orders = orders.size();
  played.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return played;
}

}  // namespace plumb::sim

// Plays scenarios under many seeds and says what came out.
#include "cli/sim.h"

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include <charconv>
#include <cstdio>
#include <limits>

#include "cli/output.h"
#include "cli/settings.h"
#include "plumb/sim.h"
#include "plumb/strategy.h"
#include "sim/scenarios.h"

namespace plumb::cli {

namespace {

constexpr const char* kHelp =
    "Usage: plumb sim [flags]\n"
    "\n"
    "Runs the engine on a simulated accelerator: streams in any legal order, one order per seed. A race is reported\n"
    "whether or not it struck; results are compared with the CPU's bit by bit.\n"
    "\n"
    "  --seeds N         seeds per scenario and strategy (default 20)\n"
    "  --first N         the first seed (default 0); `--first 7 --seeds 1` replays seed 7\n"
    "  --scenario NAME   one scenario, by name or id\n"
    "  --strategy NAME   one strategy\n"
    "  --list            the scenarios\n"
    "  --demo            a small program with deliberate races, and its report\n"
    "  --json            machine-readable lines\n"
    "\n"
    "Exit codes: 0 no race and the CPU's bits, 1 otherwise, 2 wrong flag or value.\n";

struct Wanted {
  uint64_t seeds = 20;
  uint64_t first = 0;
  std::string scenario, strategy;
  bool list = false, demo = false, json = false, help = false;
};

uint64_t number(const std::string& flag, const std::string& text, uint64_t least) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) {
    throw UsageError(flag + " takes a whole number from " + std::to_string(least) + ", not " + in_quotes(text));
  }
  return value;
}

Wanted read(const std::vector<std::string>& words) {
  Wanted wanted;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    const std::string flag = words[i].substr(0, equals);
    const auto value = [&]() -> std::string {
      if (equals != std::string::npos && equals + 1 < words[i].size()) return words[i].substr(equals + 1);
      if (equals != std::string::npos) throw UsageError(flag + " takes a value");
      if (i + 1 < words.size()) return words[++i];
      throw UsageError(flag + " takes a value");
    };
    if (flag == "--seeds") {
      wanted.seeds = number(flag, value(), 1);
    } else if (flag == "--first") {
      wanted.first = number(flag, value(), 0);
    } else if (flag == "--scenario") {
      wanted.scenario = value();
    } else if (flag == "--strategy") {
      wanted.strategy = value();
    } else if (flag == "--list") {
      wanted.list = true;
    } else if (flag == "--demo") {
      wanted.demo = true;
    } else if (flag == "--json") {
      wanted.json = true;
    } else if (flag == "--help" || flag == "-h") {
      wanted.help = true;
    } else {
      throw UsageError("unknown flag " + in_quotes(words[i]) + "; `plumb sim --help` lists them");
    }
  }
  const uint64_t most = std::numeric_limits<uint64_t>::max() - wanted.first;
  if (wanted.seeds - 1 > most) {
    throw UsageError("--first " + std::to_string(wanted.first) + " and --seeds " + std::to_string(wanted.seeds) +
                     ": the last seed is more than " + std::to_string(std::numeric_limits<uint64_t>::max()) +
                     "; make one of them smaller");
  }
  return wanted;
}

template <class Lookup>
auto looked_up(const Lookup& lookup) {
  try {
    return lookup();
  } catch (const Error& error) {
    throw UsageError(error.what());  // a name the user gave
  }
}

void list(bool json) {
  for (const sim::Scenario& scenario : sim::scenarios()) {
    if (json) {
      const nlohmann::ordered_json line = {{"id", scenario.id}, {"name", scenario.name}, {"what", scenario.what}};
      std::puts(line.dump().c_str());
    } else {
      std::printf("%-3s %-24s %s\n", scenario.id.c_str(), scenario.name.c_str(), scenario.what.c_str());
    }
  }
}

void say(const sim::Played& played, bool json) {
  if (json) {
    const nlohmann::ordered_json line = {{"scenario", played.scenario}, {"strategy", played.strategy},
                                         {"ranks", played.ranks},       {"seeds", played.seeds},
                                         {"orders", played.orders},     {"operations", played.operations},
                                         {"races", played.races},       {"differences", played.differences},
                                         {"seconds", played.seconds},   {"report", played.report}};
    std::puts(line.dump().c_str());
  } else {
    std::printf("%-24s %-9s %5d %7llu %7zu %6llu %11llu %8.1f\n", played.scenario.c_str(), played.strategy.c_str(),
                played.ranks, static_cast<unsigned long long>(played.seeds), played.orders,
                static_cast<unsigned long long>(played.races), static_cast<unsigned long long>(played.differences),
                played.seconds);
    if (!played.good()) {
      std::printf("\nseed %llu:\n%s\n", static_cast<unsigned long long>(played.first_bad), played.report.c_str());
    }
  }
  flush_output();
}

}  // namespace

int sim(const std::vector<std::string>& words) {
  const Wanted wanted = read(words);
  if (wanted.help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  if (wanted.list) {
    list(wanted.json);
    return 0;
  }
  at::set_num_threads(1);
  sim::init(4);
  if (wanted.demo) {
    std::fputs(sim::demo(wanted.first ? wanted.first : 1).c_str(), stdout);
    return 0;
  }
  const auto scenarios = looked_up([&] { return sim::scenarios_called(wanted.scenario); });
  std::vector<std::string> rows;
  for (const Strategy& row : strategies()) rows.push_back(row.name);
  if (!wanted.strategy.empty()) rows = {looked_up([&] { return strategy(wanted.strategy); }).name};

  if (!wanted.json) {
    std::printf("%-24s %-9s %5s %7s %7s %6s %11s %8s\n", "scenario", "strategy", "ranks", "seeds", "orders", "races",
                "differences", "seconds");
  }
  sim::Played total;
  for (const sim::Scenario* scenario : scenarios) {
    for (const std::string& row : rows) {
      const sim::Played played = sim::play(*scenario, row, wanted.first, wanted.seeds);
      say(played, wanted.json);
      total.seeds += played.seeds;
      total.orders += played.orders;
      total.operations += played.operations;
      total.races += played.races;
      total.differences += played.differences;
      total.seconds += played.seconds;
    }
  }
  if (wanted.json) {
    const nlohmann::ordered_json line = {{"runs", total.seeds},  {"orders", total.orders},
                                         {"races", total.races}, {"differences", total.differences},
                                         {"good", total.good()}, {"seconds", total.seconds}};
    std::puts(line.dump().c_str());
  } else {
    std::printf("%llu races and %llu results other than the CPU's in %llu runs (%zu orders, %llu operations, %.1f s)\n",
                static_cast<unsigned long long>(total.races), static_cast<unsigned long long>(total.differences),
                static_cast<unsigned long long>(total.seeds), total.orders,
                static_cast<unsigned long long>(total.operations), total.seconds);
  }
  return total.good() ? 0 : 1;
}

}  // namespace plumb::cli

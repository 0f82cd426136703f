// From words to checked settings.
#include "cli/settings.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <sstream>

#include "cli/flags.h"
#include "plumb/error.h"
#include "plumb/strategy.h"

namespace plumb::cli {

namespace {

void one_of(const std::string& flag, const std::string& value, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), value) != names.end()) return;
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
  throw UsageError("--" + flag + " '" + value + "' is unknown; it is one of: " + list);
}

template <class Number>
void at_least(const std::string& flag, Number value, Number least) {
  if (value >= least) return;
  std::ostringstream text;
  text << "--" << flag << " is " << value << "; it must be at least " << least;
  throw UsageError(text.str());
}

template <class Number>
void at_most(const std::string& flag, Number value, Number most) {
  if (value <= most) return;
  std::ostringstream text;
  text << "--" << flag << " is " << value << "; it must be at most " << most;
  throw UsageError(text.str());
}

void above_zero(const std::string& flag, double value) {
  if (value > 0) return;
  std::ostringstream text;
  text << "--" << flag << " is " << value << "; it must be more than 0";
  throw UsageError(text.str());
}

void check(const Settings& s) {
  std::vector<std::string> names;
  for (const auto& row : strategies()) names.push_back(row.name);
  one_of("strategy", s.strategy, names);
  if (!s.backend.empty()) one_of("backend", s.backend, {"shm", "gloo", "nccl", "local"});
  one_of("device", s.device, {"cpu", "cuda"});
  one_of("model", s.model, {"gpt", "moe"});
  one_of("dtype", s.dtype, {"f32", "bf16"});
  if (s.backend == "nccl" && s.device != "cuda") throw UsageError("--backend nccl needs --device cuda");
  above_zero("timeout", s.timeout);
  at_most("timeout", s.timeout, 1e6);
  above_zero("bucket-mb", s.bucket_mb);
  at_most("bucket-mb", s.bucket_mb, 1e6);
  at_least<int64_t>("threads", s.threads, 0);
  at_most<int64_t>("threads", s.threads, 1024);
  for (const auto& [flag, value] : std::map<std::string, int64_t>{{"layers", s.layers},
                                                                  {"heads", s.heads},
                                                                  {"width", s.width},
                                                                  {"context", s.context},
                                                                  {"experts", s.experts},
                                                                  {"top-k", s.top_k},
                                                                  {"steps", s.steps},
                                                                  {"batch", s.batch},
                                                                  {"accumulate", s.accumulate},
                                                                  {"digits", s.digits}}) {
    at_least<int64_t>(flag, value, 1);
  }
  at_most<int64_t>("digits", s.digits, 9);
  at_most<int64_t>("experts", s.experts, 10'000);
  at_most<int64_t>("top-k", s.top_k, s.experts);
  at_most<int64_t>("layers", s.layers, 10'000);
  at_most<int64_t>("width", s.width, 1'000'000);
  at_most<int64_t>("context", s.context, 10'000'000);
  if (s.width % s.heads != 0) {
    throw UsageError("--width " + std::to_string(s.width) + " is not divisible by --heads " + std::to_string(s.heads));
  }
  above_zero("lr", s.lr);
  at_least<int64_t>("warmup", s.warmup, 0);
  at_least("weight-decay", s.weight_decay, 0.0);
  at_least("clip", s.clip, 0.0);
  at_least<int64_t>("seed", s.seed, 0);
  at_least<int64_t>("eval-every", s.eval_every, -1);
  if (s.data.empty() && s.context < 3 * s.digits + 2) {
    throw UsageError("--context " + std::to_string(s.context) + " is too short: sums of " + std::to_string(s.digits) +
                     " digits need " + std::to_string(3 * s.digits + 2));
  }
  std::error_code ignored;
  if (!s.out.empty() && std::filesystem::exists(s.out, ignored) && !std::filesystem::is_directory(s.out, ignored)) {
    throw UsageError("--out '" + s.out + "' exists and is not a folder");
  }
}

}  // namespace

Settings read_settings(const std::vector<std::string>& words, bool& help) {
  Settings settings;
  const std::vector<Flag> table = flags(settings);
  CLI::App app;
  app.set_help_flag();
  std::map<std::string, std::string> text;
  std::map<std::string, CLI::Option*> options;
  std::string config;
  help = false;
  app.add_flag("-h,--help", help);
  auto* config_option = app.add_option("--config", config);
  for (const Flag& flag : table) {
    if (auto* const* on = std::get_if<bool*>(&flag.target)) {
      options[flag.name] = app.add_flag("--" + flag.name, **on);
    } else {
      options[flag.name] =
          app.add_option("--" + flag.name, text[flag.name])->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ExtrasError&) {
    throw UsageError("unknown argument '" + app.remaining().at(0) + "'; see `plumb train --help`");
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string text = error.what();  // "--steps: 1 required …"
    throw UsageError(text.substr(0, text.find(':')) + " needs a value");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (help) return settings;

  std::vector<std::string> given;
  for (const Flag& flag : table) {
    if (options[flag.name]->count() == 0) continue;
    given.push_back(flag.name);
    if (!std::holds_alternative<bool*>(flag.target)) assign(flag, text[flag.name], "--" + flag.name);
  }
  constexpr int64_t unset = std::numeric_limits<int64_t>::min();
  if (options["ranks"]->count() == 0) settings.ranks = unset;
  if (config_option->count() > 0) read_toml(config, table, given);
  if (settings.ranks == unset) {
    settings.ranks = 0;
  } else {
    at_least<int64_t>("ranks", settings.ranks, 1);
    at_most<int64_t>("ranks", settings.ranks, 4096);
  }
  check(settings);
  return settings;
}

void check_batch(const Settings& s, int64_t ranks) {
  if (s.batch % (ranks * s.accumulate) == 0) return;
  throw UsageError("--batch " + std::to_string(s.batch) + " does not divide into " + std::to_string(ranks) +
                   (ranks == 1 ? " rank" : " ranks") + " times " + std::to_string(s.accumulate) +
                   (s.accumulate == 1 ? " micro-batch" : " micro-batches") + "; the nearest that does is " +
                   std::to_string((s.batch / (ranks * s.accumulate) + 1) * ranks * s.accumulate));
}

std::string train_help() {
  Settings defaults;
  std::ostringstream text;
  text << "Usage: plumb train [flags]\n\n"
          "Trains a small model, data-parallel. Without --data it learns integer addition from examples made on the\n"
          "fly. Under torchrun --no-python, mpirun or srun it takes part in their world; otherwise --ranks starts "
          "one.\n";
  std::string group;
  for (const Flag& flag : flags(defaults)) {
    if (flag.group != group) text << "\n" << (group = flag.group) << "\n";
    std::ostringstream line;
    line << "  --" << flag.name << " " << flag.value;
    std::string left = line.str();
    left.resize(std::max<size_t>(24, left.size() + 1), ' ');
    text << left << flag.help;
    std::visit(
        [&](auto* value) {
          if constexpr (std::is_same_v<decltype(value), std::string*>) {
            if (!value->empty()) text << " [" << *value << "]";
          } else if constexpr (!std::is_same_v<decltype(value), bool*>) {
            if (flag.name != "ranks" && flag.name != "threads" && flag.name != "eval-every") {
              text << " [" << *value << "]";
            }
          }
        },
        flag.target);
    text << "\n";
  }
  text << "  --config FILE         the same settings as `name = value` lines of TOML; flags win\n"
          "  -h, --help            this page\n";
  return text.str();
}

nlohmann::ordered_json to_json(const Settings& settings) {
  Settings copy = settings;
  nlohmann::ordered_json all;
  for (const Flag& flag : flags(copy)) {
    std::visit([&](auto* value) { all[flag.name] = *value; }, flag.target);
  }
  return all;
}

}  // namespace plumb::cli

// From words to checked settings.
#include "cli/settings.h"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <limits>
#include <sstream>

#include "cli/flags.h"
#include "plumb/error.h"
#include "plumb/strategy.h"
#include "watch/report.h"
#include "watch/wire.h"

namespace plumb::cli {

std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 32 && byte != 127) {
      out += c;
    } else if (c == '\n' || c == '\t' || c == '\r') {
      out += c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\r";
    } else {
      constexpr const char* kDigits = "0123456789abcdef";
      out += std::string("\\x") + kDigits[byte / 16] + kDigits[byte % 16];
    }
  }
  return out;
}

std::string in_quotes(const std::string& value) {
  constexpr size_t kLongest = 80;  // bytes
  if (value.size() <= kLongest) return "'" + printable(value) + "'";
  size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(value[end]) & 0xc0) == 0x80) --end;  // not within a UTF-8 character
  return "'" + printable(value.substr(0, end)) + "…'";
}

void one_of(const std::string& flag, const std::string& value, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), value) != names.end()) return;
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
  throw UsageError("--" + flag + " " + in_quotes(value) + " is unknown; it is one of: " + list);
}

namespace {

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

// No run is larger than the upper bounds, and no product of two or three of them leaves 64 bits.
void within(const std::string& flag, int64_t value, int64_t least, int64_t most) {
  at_least(flag, value, least);
  at_most(flag, value, most);
}

constexpr int64_t kMostSteps = 1'000'000'000;

void above_zero(const std::string& flag, double value) {
  if (value > 0) return;
  std::ostringstream text;
  text << "--" << flag << " is " << value << "; it must be more than 0";
  throw UsageError(text.str());
}

// What a run can never write to is told before it begins: the folder, or what there is of the way to it.
void can_be_written(const std::string& flag, const std::string& folder) {
  namespace fs = std::filesystem;
  if (folder.empty()) return;
  std::error_code ignored;
  fs::path there = fs::absolute(folder, ignored);
  while (there.has_relative_path() && !fs::exists(there, ignored)) there = there.parent_path();
  if (!fs::is_directory(there, ignored)) {
    throw UsageError("--" + flag + " " + in_quotes(folder) + ": " + in_quotes(there) + " is not a folder");
  }
  if (access(there.c_str(), W_OK | X_OK) != 0) {
    throw UsageError("--" + flag + " " + in_quotes(folder) + ": " + in_quotes(there) +
                     " cannot be written to: " + std::generic_category().message(errno));
  }
}

void check(const Settings& s) {
  check_sizes(s);
  if (!s.backend.empty()) one_of("backend", s.backend, {"shm", "tcp", "gloo", "nccl", "local"});
  one_of("device", s.device, {"cpu", "cuda"});
  one_of("model", s.model, {"gpt", "moe"});
  if (s.backend == "nccl" && s.device != "cuda") throw UsageError("--backend nccl needs --device cuda");
  if (s.deterministic && s.dtype == "f16") {
    throw UsageError(
        "--deterministic cannot keep its promise with --dtype f16: a backward's gradients are scaled by its rank's "
        "number "
        "of shares, and f16's narrow range rounds them otherwise on other worlds; choose bf16 or f32");
  }
  try {
    read_shape(s.shape);
  } catch (const Error& error) {
    throw UsageError("--shape: " + without_prefix(error.what()));
  }
  above_zero("timeout", s.timeout);
  at_most("timeout", s.timeout, 1e6);
  within("virtual-ranks", s.virtual_ranks, 1, 1 << 20);
  within("threads", s.threads, 0, 1024);
  within("digits", s.digits, 1, 9);
  within("steps", s.steps, 1, kMostSteps);
  within("batch", s.batch, 1, 10'000'000);
  within("questions", s.questions, 1, 10'000'000);
  above_zero("lr", s.lr);
  within("warmup", s.warmup, 0, kMostSteps);
  at_least("weight-decay", s.weight_decay, 0.0);
  at_least("clip", s.clip, 0.0);
  at_least<int64_t>("seed", s.seed, 0);
  within("eval-every", s.eval_every, -1, kMostSteps);
  if (s.data.empty() && s.context < 3 * s.digits + 2) {
    throw UsageError("--context " + std::to_string(s.context) + " is too short: sums of " + std::to_string(s.digits) +
                     " digits need " + std::to_string(3 * s.digits + 2));
  }
  one_of("nonfinite", s.nonfinite, {"error", "skip", "continue"});
  if (s.trace_nonfinite && s.nonfinite != "error") {
    throw UsageError("--trace-nonfinite says where a NaN or inf began when it ends the run: add --nonfinite error");
  }
  within("verify", s.verify, 0, kMostSteps);
  within("save-every", s.save_every, 0, kMostSteps);
  within("keep", s.keep, 0, 1'000'000);
  within("restarts", s.restarts, 0, 1'000'000);
  within("min-ranks", s.min_ranks, 0, 1 << 20);
  if (s.checkpoint.empty() && (s.save_every > 0 || s.restarts > 0 || s.min_ranks > 0)) {
    throw UsageError("--save-every, --restarts and --min-ranks need a folder for checkpoints: --checkpoint DIR");
  }
  if (s.resume.empty()) throw UsageError("--resume is empty; it is auto, never, or the path of a checkpoint");
  if (s.min_ranks > 0 && s.restarts == 0) throw UsageError("--min-ranks is of --restarts; say how many");
  if (s.ranks > 0 && s.min_ranks > s.ranks) {
    throw UsageError("--min-ranks " + std::to_string(s.min_ranks) + " is more than --ranks " + std::to_string(s.ranks));
  }
  if (s.restarts > 0 && s.backend == "local") {
    throw UsageError("--restarts starts processes again, and --backend local makes ranks threads of this one");
  }
  std::error_code ignored;
  if (s.resume != "auto" && s.resume != "never" && !std::filesystem::exists(s.resume, ignored)) {
    throw UsageError("--resume " + in_quotes(s.resume) +
                     " does not exist; it is auto, never, or the path of a checkpoint");
  }
  can_be_written("checkpoint", s.checkpoint);
  can_be_written("record", s.record);
  if (!s.out.empty() && std::filesystem::exists(s.out, ignored) && !std::filesystem::is_directory(s.out, ignored)) {
    throw UsageError("--out '" + s.out + "' exists and is not a folder");
  }
}

}  // namespace

int64_t bucket_bytes(const Settings& s) { return std::max<int64_t>(1, static_cast<int64_t>(s.bucket_mb * (1 << 20))); }

void check_sizes(const Settings& s) {
  std::vector<std::string> names;
  for (const auto& row : strategies()) names.push_back(row.name);
  one_of("strategy", s.strategy, names);
  one_of("dtype", s.dtype, {"f32", "bf16", "f16"});
  above_zero("bucket-mb", s.bucket_mb);
  at_most("bucket-mb", s.bucket_mb, 1e6);
  read_mesh(s.mesh);
  within("layers", s.layers, 1, 10'000);
  within("heads", s.heads, 1, 1'000'000);
  within("width", s.width, 1, 1'000'000);
  within("context", s.context, 1, 10'000'000);
  within("experts", s.experts, 1, 10'000);
  within("top-k", s.top_k, 1, s.experts);
  within("accumulate", s.accumulate, 1, 1'000'000);
  if (s.width % s.heads != 0) {
    throw UsageError("--width " + std::to_string(s.width) + " is not divisible by --heads " + std::to_string(s.heads));
  }
}

Settings read_settings(const std::vector<std::string>& words, bool& help) {
  Settings settings;
  const std::vector<Flag> table = flags(settings);
  Parsed parsed = parse("train", words, table);
  help = parsed.help;
  if (help) return {};
  if (parsed.config) {
    for (std::string& name : read_toml(*parsed.config, table, parsed.given)) parsed.given.push_back(std::move(name));
  }
  const auto given = [&](const char* name) { return std::ranges::count(parsed.given, name) > 0; };
  if (given("ranks")) within("ranks", settings.ranks, 1, 4096);
  settings.accumulate_given = given("accumulate");
  check(settings);
  return settings;
}

Mesh read_mesh(const std::string& text) {
  const auto wrong = [&](const std::string& why) {
    throw UsageError("--mesh " + in_quotes(text) + ": " + why + "; write it as replicate=2,shard=2");
  };
  Mesh mesh;
  std::istringstream axes(text);
  for (std::string axis; std::getline(axes, axis, ',');) {
    const size_t equals = axis.find('=');
    const std::string name = axis.substr(0, equals);
    if (equals == std::string::npos) wrong(in_quotes(axis) + " is no axis");
    if (name != "replicate" && name != "shard") wrong("the axes are replicate and shard, not " + in_quotes(name));
    int& size = name == "shard" ? mesh.shard : mesh.replicate;
    if (size != 0) wrong("'" + name + "' stands there twice");
    const std::string number = axis.substr(equals + 1);
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), size);
    if (error != std::errc() || end != number.data() + number.size() || size < 1 || size > 1'000'000'000) {
      wrong(in_quotes(number) + " is no number of ranks");
    }
  }
  if (!text.empty() && text.back() == ',') wrong("an axis is missing at its end");
  return mesh;
}

Mesh mesh_for(const std::string& name, const std::string& text, int64_t ranks) {
  try {
    return mesh_of(strategy(name), read_mesh(text), static_cast<int>(ranks));
  } catch (const Error& error) {
    std::string what = error.what();
    if (what.rfind("plumb: ", 0) == 0) what.erase(0, 7);
    throw UsageError("--mesh " + in_quotes(text) + ": " + what);
  }
}

int64_t micro_batches(const Settings& s, int64_t ranks) {
  return s.deterministic ? s.virtual_ranks / ranks : s.accumulate;
}

namespace {

std::string count(int64_t number, const std::string& word, const std::string& ending = "s") {
  return std::to_string(number) + " " + word + (number == 1 ? "" : ending);
}

void check_shares(const Settings& s, int64_t ranks) {
  const bool power_of_two = (ranks & (ranks - 1)) == 0;
  if (!power_of_two || s.virtual_ranks % ranks != 0) {
    throw UsageError("--virtual-ranks " + std::to_string(s.virtual_ranks) + " cannot be shared by " +
                     count(ranks, "rank") +
                     " as a binary tree; it must be a multiple of the ranks, and those a power "
                     "of two");
  }
  if (s.accumulate_given && s.accumulate != s.virtual_ranks / ranks) {
    throw UsageError("--accumulate " + std::to_string(s.accumulate) + " does not agree with --deterministic: " +
                     count(s.virtual_ranks, "share") + " on " + count(ranks, "rank") + " are " +
                     count(s.virtual_ranks / ranks, "micro-batch", "es") + " each; leave it away");
  }
}

// What a graph cannot repeat.
void check_graph(const Settings& s, int64_t ranks) {
  const std::string wrong = s.device != "cuda" ? "--device " + s.device + ": only cuda has graphs"
                            : ranks > 1        ? count(ranks, "rank") + ": what ranks tell each other is not recorded"
                            : s.dtype == "f16" ? "--dtype f16: its loss scale changes from step to step"
                            : s.deterministic  ? "--deterministic: its sums are the host's"
                            : s.model == "moe" && s.dtype == "f32"
                                ? "--model moe --dtype f32: the host counts the tokens of its experts"
                            : s.verify > 0 ? "--verify: a step that is checked runs again on the host"
                                           : "";
  if (!wrong.empty()) throw UsageError("--graph does not go with " + wrong);
}

}  // namespace

void check_world(const Settings& s, int64_t ranks) {
  if (s.graph) check_graph(s, ranks);
  mesh_for(s.strategy, s.mesh, ranks);
  if (s.deterministic) check_shares(s, ranks);
  const int64_t micros = ranks * micro_batches(s, ranks);
  if (s.batch % micros == 0) return;
  const std::string parts = s.deterministic
                                ? count(s.virtual_ranks, "share") + " (--virtual-ranks)"
                                : count(ranks, "rank") + " times " + count(s.accumulate, "micro-batch", "es");
  throw UsageError("--batch " + std::to_string(s.batch) + " does not divide into " + parts +
                   "; the nearest that does is " + std::to_string((s.batch / micros + 1) * micros));
}

std::string train_help() {
  Settings defaults;
  return "Usage: plumb train [flags]\n\n"
         "Trains a small model, data-parallel. Without --data it learns integer addition from examples made on the\n"
         "fly. Under torchrun --no-python, mpirun or srun it takes part in their world; otherwise --ranks starts "
         "one.\n" +
         describe(flags(defaults)) +
         "  --config FILE         the same settings as `name = value` lines of TOML; flags win\n"
         "  -h, --help            this page\n";
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

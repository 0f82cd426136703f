// Everything `plumb train` can be told, from flags and from a TOML file, checked before anything starts.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "plumb/strategy.h"

namespace plumb::cli {

// What the user asked for cannot be meant: one line on stderr, exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Text on one line: control characters as \n or \x1b.
std::string printable(const std::string& text);

// A value that the user gave, for an error: printable, in quotes, and cut where it is long.
std::string in_quotes(const std::string& value);

struct Settings {
  // world
  int64_t ranks = 0;  // 0: the launcher's world when there is one, otherwise 1
  std::string strategy = "ddp";
  std::string mesh;     // "replicate=2,shard=2"; empty: the strategy's own
  std::string backend;  // empty: nccl with cuda, shm on one machine, gloo otherwise
  std::string device = "cpu";
  double timeout = 60.0;  // seconds
  double bucket_mb = 4.0;
  std::string shape;  // of the links between ranks, for trials; empty: as they are
  bool hold_unsharded = false;
  bool deterministic = false;
  int64_t virtual_ranks = 8;  // shares of the batch in deterministic mode
  bool graph = false;
  int64_t threads = 0;  // 0: the cores divided among the local ranks
  // model
  std::string model = "gpt";
  int64_t layers = 3;
  int64_t heads = 4;
  int64_t width = 96;
  int64_t context = 64;
  int64_t experts = 8;  // of --model moe
  int64_t top_k = 2;
  std::string dtype = "f32";
  bool recompute = false;
  // task
  std::string data;  // empty: integer addition
  int64_t digits = 3;
  // training
  int64_t steps = 1000;
  int64_t batch = 256;  // samples per step, all ranks together
  int64_t accumulate = 1;
  bool accumulate_given = false;  // no setting of its own
  double lr = 2e-3;
  int64_t warmup = 100;
  double weight_decay = 0.01;
  double clip = 1.0;  // 0: never clips
  int64_t seed = 1;
  int64_t eval_every = -1;   // -1: ten times in a run of at least 100 steps; 0: at the end only
  int64_t questions = 1024;  // asked at the end
  std::string nonfinite = "continue";
  bool trace_nonfinite = false;
  int64_t verify = 0;  // steps; 0: never
  // checkpoints
  std::string checkpoint;  // the folder of them; empty: none
  int64_t save_every = 0;  // steps; 0: at the end only
  std::string resume = "auto";
  int64_t keep = 3;  // 0: all
  int64_t restarts = 0;
  int64_t min_ranks = 0;  // 0: a restart has as many ranks as the run
  // output
  std::string record;  // a folder; empty: failures are not recorded
  std::string trace;   // a file; empty: none
  std::string out;     // empty: no run folder
  bool json = false;
  bool quiet = false;
};

// Reads the words after `plumb train`, and the file that --config names. Flags win over the file. Throws UsageError.
// Sets `help` and checks nothing when --help is among them.
Settings read_settings(const std::vector<std::string>& words, bool& help);

// The cap of a gradient bucket.
int64_t bucket_bytes(const Settings& settings);

// The checks that a run and its estimate share. Throws UsageError.
void check_sizes(const Settings& settings);
// Throws UsageError unless `value` is one of `names`.
void one_of(const std::string& flag, const std::string& value, const std::vector<std::string>& names);

// The checks that need the number of ranks, made once it is known. Throws UsageError.
void check_world(const Settings& settings, int64_t ranks);

// The axes asked for, as far as the text says. Throws UsageError.
Mesh read_mesh(const std::string& text);

// The axes of a world of `ranks`. Throws UsageError where they do not multiply to it.
Mesh mesh_for(const std::string& strategy, const std::string& text, int64_t ranks);

// Backwards per step and rank.
int64_t micro_batches(const Settings& settings, int64_t ranks);

std::string train_help();

// Every setting by its flag's name.
nlohmann::ordered_json to_json(const Settings& settings);

}  // namespace plumb::cli

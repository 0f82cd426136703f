// --record: the inputs and generators of the last few steps, in memory; on the disk when the run fails, with the engine's
// state, so that `plumb replay` can run the step again in one process.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cli/settings.h"
#include "model/task.h"
#include "plumb/engine.h"

namespace plumb::cli {

class Recorder {
 public:
  // With an empty settings.record it does nothing.
  Recorder(Engine& engine, const Settings& settings, int64_t vocabulary)
      : engine_(engine), settings_(settings), vocabulary_(vocabulary) {}

  // A step begins.
  void begin(int64_t samples, const std::vector<model::Batch>& batches, std::vector<at::Tensor> generators);
  // The run fails: this rank's part goes to the folder, alone, since the others may be gone. Never throws; says on stderr
  // what it could not do.
  void write(const std::string& error) noexcept;

 private:
  struct Kept {
    int64_t step = 0, samples = 0, bytes = 0;
    std::vector<model::Batch> batches;
    std::vector<at::Tensor> generators;
  };
  void write_all(const std::string& error);

  Engine& engine_;
  const Settings& settings_;
  const int64_t vocabulary_;
  std::deque<Kept> kept_;
};

// What one rank wrote.
struct Record {
  int rank = 0, ranks = 1;
  int64_t micros = 1, step = 0, samples = 0, vocabulary = 0;
  std::string error;
  std::string stateless;  // why its part of the state is not there; empty: it is
  Settings settings;
  std::vector<model::Batch> batches;  // of the step that failed
  std::vector<at::Tensor> generators;
};

// The folder of a failure in `path`: itself, or the last one that was written there. Throws Error.
std::string failure_in(const std::string& path);
// Of every rank, in order. Throws Error where a rank's is missing or cannot be read.
std::vector<Record> read_records(const std::string& folder);
// The parts of the state as one checkpoint, in the folder itself. Throws Error where some is missing.
void join_state(const std::string& folder, int ranks);

}  // namespace plumb::cli

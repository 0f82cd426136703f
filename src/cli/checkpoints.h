// The checkpoints of one run, as its flags ask for them.
#pragma once

#include <cstdint>

#include "cli/settings.h"
#include "plumb/engine.h"
#include "plumb/save.h"

namespace plumb::cli {

// Set by our launcher for its ranks: the number of the newest checkpoint that lay in --checkpoint before the run began.
inline constexpr const char* kOlderCheckpoints = "PLUMB_OLDER_CHECKPOINTS";

class Checkpoints {
 public:
  Checkpoints(Engine& engine, const Settings& settings) : engine_(engine), settings_(settings) {}

  // Where the data goes on: samples that were used by the runs before this one. Collective, as everything here.
  int64_t resume();
  // After a step: in the background, at the end of the run at once.
  void after(int64_t step, int64_t samples, bool last);
  // At the end of the run: an Error where what it learned is saved nowhere, unless a signal ended it, which is told alone.
  void check_last(int signal) const;
  // A step, which may learn that the last checkpoint failed.
  StepInfo step();

 private:
  LoadInfo load(std::string path, int64_t after);
  void complain(const SaveError& error) const;

  Engine& engine_;
  const Settings& settings_;
  std::string unsaved_;  // why the last one failed
};

}  // namespace plumb::cli

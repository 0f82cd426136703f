// Checkpoints: all that a run needs to go on bit for bit, in one folder on disk; see docs/checkpoints.md.
//
//   engine.save("runs/a/checkpoints", {.samples = used, .keep = 3});
//   const plumb::LoadInfo info = engine.load("runs/a/checkpoints");   // the newest complete one
//
// (Activation checkpointing, which runs forwards again, is plumb/checkpoint.h.)
#pragma once

#include <plumb/error.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace plumb {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A checkpoint could not be written; thrown on every rank. The engine and earlier checkpoints are as they were.
class SaveError : public Error {
 public:
  using Error::Error;
};

// Something of the user's that belongs to a checkpoint: rank 0's tensors are saved, and every rank gets them back.
struct Extra {
  std::string name;
  std::function<NamedTensors()> save;
  std::function<void(const NamedTensors&)> load;
};

struct SaveOptions {
  int64_t samples = 0;  // the global cursor: how many samples of the data all ranks together have used
  int64_t keep = 0;     // checkpoints that stay, this one among them, once it is durable; 0: all
  std::vector<Extra> extras;
  // Frozen parameters whose weights are not saved, since others have them; `strict = false` loads such a checkpoint.
  std::vector<std::string> leave_out = {};
};

struct LoadOptions {
  // Off: what fits is loaded, and LoadInfo says what did not.
  bool strict = true;
  std::vector<Extra> extras;
};

// A saved tensor without a place, a place without a saved tensor, or two that differ.
struct Mismatch {
  enum class Kind { missing, extra, reshaped } kind = Kind::missing;
  std::string what;  // "weight 'head.bias'"
  std::string saved, live;
};

struct LoadInfo {
  std::string path;  // of the checkpoint itself
  int64_t step = 0;
  int64_t samples = 0;
  std::vector<Mismatch> mismatches;
  std::string table() const;  // of them, one line each; empty when there are none
};

}  // namespace plumb

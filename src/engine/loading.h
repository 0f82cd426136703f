// Loading: brings a checkpoint into an engine in three parts: compare what is saved with what is there, read and check every
// byte that this rank needs, and only then fill it in.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/filling.h"
#include "engine/saving.h"
#include "plumb/engine.h"
#include "plumb/save.h"
#include "save/checkpoint.h"

namespace plumb {

// Whether the optimizer is somebody else's, who takes its state over.
enum class OuterState { none, taken };

class Loading {
 public:
  // Everything that may fail. Collective; throws on every rank, and then nothing was changed. `refusal`: why this rank
  // cannot begin; empty: it can.
  Loading(Engine::Impl& impl, const std::string& path, const LoadOptions& options, OuterState outer,
          const std::string& refusal = "");

  const LoadInfo& info() const { return info_; }
  // The other optimizer's state, in the parts that this rank needs.
  const Outer& outer() const { return outer_; }
  // Of a random generator that is not torch's: this rank's state, as bytes, or where it was not there before a seed of its
  // own, the same whenever this is loaded.
  struct Generator {
    std::string name;
    at::Tensor state;  // undefined: the seed
    uint64_t seed = 0;
  };
  const std::vector<Generator>& outer_generators() const { return outer_generators_; }
  // Nothing was changed so far. `refusal`: why this rank's outer optimizer does not take its state; empty: it does. Then
  // the extras take theirs, who may refuse, too: then those that had taken it get back what they had. Collective; an Error
  // on every rank.
  void accept(const std::string& refusal);
  // Cannot fail. Collective.
  void apply();

 private:
  void compare(OuterState outer);
  void expect(const save::SavedTensor* saved, const SavedSlot& slot);
  void read();
  std::vector<Generator> read_generators() const;
  bool mismatched(const std::string& what) const;
  void restore_settings();
  std::vector<int64_t> updates_by_sink() const;

  Engine::Impl& impl_;
  LoadOptions options_;
  LoadInfo info_;
  std::unique_ptr<save::Checkpoint> checkpoint_;
  std::map<std::string, int64_t> updates_;
  std::vector<Filling> fillings_;
  std::vector<const save::SavedTensor*> outers_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;  // torch's, with the states they get
  std::vector<Generator> outer_generators_;
  std::map<std::string, NamedTensors> extras_;
  Outer outer_;
};

}  // namespace plumb

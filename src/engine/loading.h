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
  // Everything that may fail. Collective; throws on every rank, and then nothing was changed.
  Loading(Engine::Impl& impl, const std::string& path, const LoadOptions& options, OuterState outer);

  const LoadInfo& info() const { return info_; }
  // The other optimizer's state, in the parts that this rank needs.
  const Outer& outer() const { return outer_; }
  // Cannot fail. Collective.
  void apply();

 private:
  void compare(const LoadOptions& options, OuterState outer);
  void expect(const save::SavedTensor* saved, const SavedSlot& slot);
  void read(const LoadOptions& options);
  void restore_settings();
  std::vector<int64_t> updates_by_sink() const;

  Engine::Impl& impl_;
  LoadInfo info_;
  std::unique_ptr<save::Checkpoint> checkpoint_;
  std::map<std::string, int64_t> updates_;
  std::vector<Filling> fillings_;
  std::vector<const save::SavedTensor*> outers_;
  std::vector<at::Tensor> generators_;  // this rank's, beside names in generator_names_
  std::vector<std::string> generator_names_;
  std::map<std::string, NamedTensors> extras_;
  Outer outer_;
};

}  // namespace plumb

// Saving: takes a snapshot of an engine and brings it to the disk, on every rank its part, as one checkpoint or none.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/items.h"
#include "engine/snapshot.h"
#include "engine/together.h"
#include "plumb/engine.h"
#include "plumb/save.h"
#include "save/folder.h"

namespace plumb {

// Between steps, when no gradients wait for one; or also between the backwards of a step: what is saved is of the step before,
// and their gradients are not.
enum class When { between_steps, between_backwards };
enum class Copy { no, yes };  // the memory that is written is the engine's own, or a copy of it

class Saving {
 public:
  explicit Saving(Engine::Impl& impl) : impl_(impl) {}
  // A checkpoint that is not complete is lost, and somebody is told.
  ~Saving();

  // All are collective, and throw on every rank. Ends an earlier one first. With Copy::yes the snapshot is what the engine
  // is now, whatever it trains meanwhile; with Copy::no nothing may change before finish().
  // `generators`: states of this rank's random generators beside torch's, as bytes by name. `refusal`: why this rank's outer
  // optimizer does not give its state; empty: it does.
  void begin(const std::string& folder, const SaveOptions& options, const Outer* outer, Copy copy,
             const NamedTensors& generators = {}, const std::string& refusal = "", When when = When::between_steps);
  // Goes on with what is under way, if anything; an Error says that it failed.
  void poll() { advance(Wait::no); }
  // The engine and the user's optimizer may change their memory: what is under way has a copy of all of it.
  void settle() { copies_.settle(); }
  // Alone, where the others may be gone: this rank's part, at once, into files of a folder that is there. The text of its
  // manifest; those of all ranks, joined, are a checkpoint's.
  std::string write_alone(const std::string& folder, int64_t samples);
  // The path of the last checkpoint that was completed; empty: none was.
  std::string finish();

  std::function<void()> before_writing = [] {};  // for tests: what the thread that writes does first

 private:
  struct Taken;
  Taken take(const SaveOptions& options, const Outer* outer, Copy copy, const NamedTensors& generators);
  std::string ending() const;
  Task::Runs alone() const;
  std::string prepare(const std::string& folder, const SaveOptions& options, const std::string& refusal, When when);
  std::string begin_files(const std::string& folder);
  void advance(Wait wait);
  void go_on(Wait wait);
  void rest();
  Where here(const std::string& what) const;

  Engine::Impl& impl_;
  std::map<std::string, std::unique_ptr<save::Writer>> writers_;  // rank 0's: that of the last folder
  save::Writer* writer_ = nullptr;
  std::string folder_;  // the user's word for it
  std::string root_;    // what that meant at the call
  std::string path_;    // of the files that are being written; empty: nothing is under way
  int64_t keep_ = 0;
  std::string saved_;
  Snapshot copies_;  // of the checkpoint that is being written; the thread that writes it completes and reads them
  enum class Phase { writing, committing } phase_ = Phase::writing;
  std::unique_ptr<Task> task_;
};

}  // namespace plumb

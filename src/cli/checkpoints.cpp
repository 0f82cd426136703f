#include "cli/checkpoints.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/process.h"
#include "save/checkpoint.h"
#include "save/folder.h"
#include "watch/report.h"
#include "watch/strike.h"
#include "world/group.h"

namespace plumb::cli {

namespace {

int64_t number_of(const std::string& path) {
  const std::filesystem::path whole = path;
  for (const save::Named& named : save::checkpoints_in(whole.parent_path().string())) {
    if (std::filesystem::path(named.path).filename() == whole.filename()) return named.number;
  }
  return -1;
}

// The newest one in `folder` that is older than `number`; -1 where there is none.
int64_t number_before(const std::string& folder, int64_t number) {
  int64_t before = -1;
  for (const save::Named& named : save::checkpoints_in(folder)) {
    if (named.number < number) before = std::max(before, named.number);
  }
  return before;
}

std::string path_of(const std::string& folder, int64_t number) {
  for (const save::Named& named : save::checkpoints_in(folder)) {
    if (named.number == number) return named.path;
  }
  return folder + "/" + std::to_string(number);  // which this rank does not see, and says so
}

// Whether it was the checkpoint's bytes that made its load fail with `why`.
bool is_damaged(const std::string& path, const std::string& why) {
  try {
    save::Checkpoint whole(path);
    return why.find("was damaged: ") != std::string::npos;
  } catch (const Error&) {
    return true;
  }
}

}  // namespace

int64_t Checkpoints::resume() {
  const World& world = engine_.world();
  std::string from = settings_.resume == "never" ? "" : settings_.resume;
  // Started again by the launcher, a run goes on from what it saved itself, if anything: what lay in the folder before it
  // counts only where it was to go on from there.
  const int64_t older = from == "auto" ? -1 : environment_number(kOlderCheckpoints, -1);
  int64_t after = -1;
  if (from == "auto" || restarts_before() > 0) {
    std::vector<std::string> skipped;
    auto newest = settings_.checkpoint.empty() ? std::nullopt : save::newest_in(settings_.checkpoint, &skipped);
    if (newest && number_of(*newest) <= older) newest.reset();
    // Nothing that ends a run leaves one like that: who starts from nothing beside it must want to.
    if (!newest && !skipped.empty() && older < 0) {
      throw Error("of the checkpoints in '" + settings_.checkpoint + "' none is complete: " + skipped.front() +
                  "; --resume never starts from nothing");
    }
    for (const std::string& why : world.rank() == 0 ? skipped : std::vector<std::string>{}) {
      std::fprintf(stderr, "plumb: a checkpoint is passed over: %s\n", why.c_str());
    }
    const int64_t mine = newest ? 1 : 0;
    const Where where{.kind = Where::Kind::step, .detail = "checkpoints"};
    const bool any = exchange(world, std::span(&mine, 1), where)[0][0] != 0;  // as rank 0 sees it
    if (any) after = older;
    from = any ? settings_.checkpoint : from == "auto" ? "" : from;
  }
  if (from.empty()) return 0;
  const LoadInfo info = load(from, after);
  engine_.set_lr(settings_.lr);  // as every other flag, it counts as it is given
  if (world.rank() == 0 && !settings_.quiet && !settings_.json) {
    std::fprintf(stderr, "plumb: goes on from '%s' (step %lld)\n", info.path.c_str(),
                 static_cast<long long>(info.step));
  }
  if (info.samples % settings_.batch != 0) {
    throw UsageError("--batch " + std::to_string(settings_.batch) + " does not divide the " +
                     std::to_string(info.samples) + " samples that '" + info.path + "' has used");
  }
  return info.samples;
}

// From `path`, or the newest in it whose bytes are as they were saved, with a number larger than `after`. What is damaged only
// shows where all is read.
LoadInfo Checkpoints::load(std::string path, int64_t after) {
  const World& world = engine_.world();
  const std::string folder = path;
  for (;;) {
    try {
      return engine_.load(path);
    } catch (const Consequence&) {
      throw;
    } catch (const Error& error) {
      const std::string why(without_prefix(error.what()));
      int64_t next = -1;
      if (world.rank() == 0 && !save::is_checkpoint(folder)) {
        const auto tried = path == folder ? save::newest_in(folder) : path;
        if (tried && is_damaged(*tried, why)) next = number_before(folder, number_of(*tried));
        if (next <= after) next = -1;
      }
      const Where where{.kind = Where::Kind::step, .detail = "the checkpoint before"};
      try {
        next = exchange(world, std::span(&next, 1), where)[0][0];
      } catch (const Error&) {
        next = -1;  // the world has ended, by what is thrown already
      }
      if (next < 0) throw;
      if (world.rank() == 0) std::fprintf(stderr, "plumb: a checkpoint is passed over: %s\n", why.c_str());
      path = path_of(folder, next);
    }
  }
}

void Checkpoints::after(int64_t step, int64_t samples, bool last) {
  if (settings_.checkpoint.empty()) return;
  const bool due = settings_.save_every > 0 && step % settings_.save_every == 0;
  if (!due && !last) return;
  const SaveOptions options{.samples = samples, .keep = settings_.keep};
  try {
    engine_.finish_save();
  } catch (const SaveError& error) {  // of the one before, which is no reason to leave this one out
    complain(error);
  }
  try {
    if (last) {
      engine_.save(settings_.checkpoint, options);
    } else {
      engine_.save_in_background(settings_.checkpoint, options);
    }
  } catch (const SaveError& error) {
    if (!last) return complain(error);
    unsaved_ = std::string(without_prefix(error.what())) + "; the state after step " + std::to_string(step) +
               " is saved nowhere, earlier checkpoints are intact";
  }
}

void Checkpoints::check_last(int signal) const {
  if (unsaved_.empty()) return;
  if (signal == 0) throw Error(unsaved_);
  if (engine_.world().rank() == 0) std::fprintf(stderr, "plumb: %s\n", unsaved_.c_str());  // it ends as it was asked to
}

StepInfo Checkpoints::step() {
  try {
    return engine_.step();
  } catch (const SaveError& error) {
    complain(error);
  }
  return engine_.step();
}

void Checkpoints::complain(const SaveError& error) const {
  if (engine_.world().rank() != 0) return;
  std::fprintf(stderr, "%s; training goes on, earlier checkpoints are intact\n", error.what());
}

}  // namespace plumb::cli

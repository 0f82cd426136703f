#include "cli/checkpoints.h"

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "save/folder.h"
#include "watch/report.h"
#include "watch/strike.h"
#include "world/group.h"

namespace plumb::cli {

int64_t Checkpoints::resume() {
  const World& world = engine_.world();
  std::string from = settings_.resume == "never" ? "" : settings_.resume;
  // Started again by the launcher, a run goes on from what it saved itself, if anything.
  if (from == "auto" || restarts_before() > 0) {
    std::vector<std::string> skipped;
    const auto newest = settings_.checkpoint.empty() ? std::nullopt : save::newest_in(settings_.checkpoint, &skipped);
    // Nothing that ends a run leaves one like that: who starts from nothing beside it must want to.
    if (!newest && !skipped.empty()) {
      throw Error("of the checkpoints in '" + settings_.checkpoint + "' none is complete: " + skipped.front() +
                  "; --resume never starts from nothing");
    }
    for (const std::string& why : world.rank() == 0 ? skipped : std::vector<std::string>{}) {
      std::fprintf(stderr, "plumb: a checkpoint is passed over: %s\n", why.c_str());
    }
    const int64_t mine = newest ? 1 : 0;
    const Where where{.kind = Where::Kind::step, .detail = "checkpoints"};
    const bool any = exchange(world, std::span(&mine, 1), where)[0][0] != 0;  // as rank 0 sees it
    from = any ? settings_.checkpoint : from == "auto" ? "" : from;
  }
  if (from.empty()) return 0;
  const LoadInfo info = engine_.load(from);
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

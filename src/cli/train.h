// One rank's training run.
#pragma once

#include "cli/settings.h"
#include "model/task.h"
#include "plumb/world.h"

namespace plumb::cli {

// Trains and, on rank 0, reports. Returns 0, or 128 + signal when any rank was asked to stop: all ranks then end after
// the same step. Throws plumb::Error.
int train(const World& world, const Settings& settings, const model::Task& task);

}  // namespace plumb::cli

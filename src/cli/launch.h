// Starts the ranks of `plumb train --ranks N` on this machine and answers for them.
#pragma once

#include <cstdint>

namespace plumb::cli {

// Runs this program again, with the same arguments, once per rank. Returns the exit code: 0 when every rank ended well;
// 128 + signal when they were asked to stop; otherwise non-zero, after one line on stderr that names the rank at fault.
// When one rank fails, the others get a few seconds to notice and are then ended. No rank outlives this process.
// `lost`, if given: how many were ended by a signal that nobody here sent.
int launch(int64_t ranks, char** argv, int64_t* lost = nullptr);

// Set for the ranks of a run that was started again after a failure.
inline constexpr const char* kRestarted = "PLUMB_RESTARTED";

}  // namespace plumb::cli

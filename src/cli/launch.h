// Starts the ranks of `plumb train --ranks N` on this machine and answers for them.
#pragma once

#include <chrono>
#include <cstdint>

namespace plumb::cli {

// Runs this program again, with the same arguments, once per rank. Returns the exit code: 0 when every rank ended well;
// 128 + signal when they were asked to stop; otherwise non-zero, after one line on stderr that names the rank at fault.
// When one rank fails, the others get a few seconds to notice and are then ended. A rank that is stopped (SIGSTOP) for
// longer than `timeout`, though nobody waits for it, is ended too. No rank outlives this process. `lost`, if given: how many
// were ended by a signal that nobody here sent, or stayed stopped.
int launch(int64_t ranks, char** argv, std::chrono::milliseconds timeout, int64_t* lost = nullptr);

}  // namespace plumb::cli

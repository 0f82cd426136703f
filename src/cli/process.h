// What a process knows about itself: its memory, its cores, the signal it was sent.
#pragma once

#include <cstdint>
#include <string>

namespace plumb::cli {

int64_t rss_bytes();       // resident now
int64_t peak_rss_bytes();  // the most it ever was, since exec

// The number of cores this process may run on.
int64_t usable_cores();

// SIGINT and SIGTERM end this process even where whoever started it ignores them, as a script does for its background
// jobs: a wish to stop must not be lost because it came before note_signals(). A write past the largest file that is allowed
// (SIGXFSZ) is an error of that write, as on a full disk.
void heed_signals();

// From then on SIGINT and SIGTERM are noted instead of ending the process; one that comes a second or more
// later ends it at once, unless a launcher of ours stands above (it then decides). Sooner ones are the same wish: a
// terminal, `timeout` and `make` each signal a process and its group.
inline constexpr int64_t kSameWish = 1'000;  // milliseconds
int64_t now_ms();                            // of a clock that only goes forward; safe in a signal handler
void note_signals();
// The signal noted, or 0.
int noted_signal();

// The whole number in an environment variable; `otherwise` where there is none.
int64_t environment_number(const char* name, int64_t otherwise);

// Set by our launcher for its ranks: where a rank writes the error it ends with. -1 when nobody listens.
inline constexpr const char* kErrorFd = "PLUMB_ERROR_FD";
inline constexpr char kConsequence = '~';  // begins the line there of a rank that fails because another one did
int error_fd();

}  // namespace plumb::cli

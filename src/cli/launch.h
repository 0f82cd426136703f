// Starts the ranks of `plumb train --ranks N` on this machine and answers for them.
#pragma once

#include <chrono>
#include <cstdint>

namespace plumb::cli {

// SIGINT, SIGTERM and SIGCHLD as they come to this process, read from a descriptor, so that none is lost between looking and
// waiting, nor between two lives of the ranks. One at a time; what comes after it has gone is lost.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return ends_[0]; }
  // The next that came and was not read yet; 0: none.
  int next() const;
  // The first wish to stop among those; 0: none.
  int wish() const;

 private:
  int ends_[2];
};

// How a life of the ranks ended.
struct Life {
  int code = 0;      // 0 when every rank ended well; 128 + signal when they were asked to stop; otherwise non-zero
  int64_t lost = 0;  // ranks that were ended by a signal that nobody here sent, or stayed stopped
};

// Runs this program again, with the same arguments, once per rank. Where a rank is at fault, one line on stderr names it.
// When one rank fails, the others get a few seconds to notice and are then ended. A rank that is stopped (SIGSTOP) for
// longer than `timeout`, though nobody waits for it, is ended too. No rank outlives this process.
Life launch(int64_t ranks, char** argv, std::chrono::milliseconds timeout, const Signals& signals);

}  // namespace plumb::cli

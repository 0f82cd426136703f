// The notice board of a world: every rank's latest report, within one process or over a store.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "world/report.h"

namespace c10d {
class Store;
}

namespace plumb {

using Clock = std::chrono::steady_clock;

class Board {
 public:
  struct Heard {
    Report report;
    Clock::time_point changed{};  // when its beat was last seen to move, by this rank's clock
  };

  virtual ~Board() = default;
  // Puts up this rank's report (the board itself adds beat and counters).
  virtual void publish(const Report& report) = 0;
  // Everybody's latest report in rank order. Nothing when the board did not answer within `patience`.
  virtual std::optional<std::vector<Heard>> read(std::chrono::milliseconds patience) = 0;
  // Why the board cannot be read any more; empty while it can.
  virtual std::string trouble() = 0;
  // Whether a report that no longer moves means a process that no longer runs.
  virtual bool beats() const = 0;
  // Publishes that this rank has left, unless it failed, and lets go. Bounded in time.
  virtual void leave() = 0;
};

// The board of ranks that are threads of one process.
struct Hall;
std::shared_ptr<Hall> make_hall(int size);
std::unique_ptr<Board> make_hall_board(std::shared_ptr<Hall> hall, int rank, std::shared_ptr<Counters> counters);

// The board over a store, renewed and read by a thread of its own, so that a store that hangs hangs nobody.
// Returns when every rank has put up a first report; throws Error naming the ranks that did not within `timeout`.
// `hosts`: this rank's process serves the store, and lingers at the end until the others have left (bounded).
std::unique_ptr<Board> make_store_board(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                        std::shared_ptr<Counters> counters, std::chrono::milliseconds timeout,
                                        bool hosts);

}  // namespace plumb

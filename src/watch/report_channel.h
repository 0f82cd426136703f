// How ranks hear of each other: every rank posts its latest report, and reads everybody's, within one process or over a store.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "watch/report.h"

namespace c10d {
class Store;
}

namespace plumb {

using Clock = std::chrono::steady_clock;

class ReportChannel {
 public:
  struct Heard {
    Report report;
    Clock::time_point changed{};  // when its beat was last seen to move, by this rank's clock
  };

  virtual ~ReportChannel() = default;
  // Posts this rank's report (the channel itself adds beat and progress).
  virtual void publish(const Report& report) = 0;
  // Everybody's latest report in rank order. Nothing when the channel did not answer within `patience`.
  virtual std::optional<std::vector<Heard>> read(std::chrono::milliseconds patience) = 0;
  // Why the channel cannot be read any more; empty while it can.
  virtual std::string trouble() = 0;
  // Whether a report that no longer moves means a process that no longer runs.
  virtual bool beats() const = 0;
  // Why this world must end though every rank of it is well: somebody else claims a part in it. Null while nobody does.
  virtual const std::string* objection() const { return nullptr; }
  // How many a server was sent for it so far.
  virtual int64_t messages() const { return 0; }
  // Publishes that this rank has left, unless it failed, and lets go. Bounded in time.
  virtual void leave() = 0;
};

// The channel of ranks that are threads of one process.
struct LocalReports;
std::shared_ptr<LocalReports> make_local_reports(int size);
std::unique_ptr<ReportChannel> make_local_channel(std::shared_ptr<LocalReports> all, int rank,
                                                  std::shared_ptr<Progress> progress);

// The channel over a store, renewed and read by a thread of its own, so that a store that hangs hangs nobody.
// Returns when every rank has posted a first report; throws Error naming the ranks that did not within `timeout`.
// Where this rank's process serves the store, it lingers at the end until the others have left (bounded).
// `contestable`: until when a claim that comes after the rendezvous (see rendezvous.h) still ends this world.
enum class StoreHost { here, elsewhere };
std::unique_ptr<ReportChannel> make_store_channel(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                  std::shared_ptr<Progress> progress, std::chrono::milliseconds timeout,
                                                  StoreHost host, Clock::time_point contestable = {});

}  // namespace plumb

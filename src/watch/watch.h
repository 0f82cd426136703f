// The watch: no rank waits forever, and the error says who kept it waiting, where, and why.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "watch/report.h"
#include "watch/report_channel.h"
#include "watch/timeline.h"
#include "watch/wire.h"

namespace c10d {
class Work;
}

namespace plumb {

class Watch {
 public:
  // `channel` may be null: then errors name what this rank knows. `slice`: how long a wait stays silent.
  Watch(int rank, int size, std::chrono::milliseconds timeout, std::chrono::milliseconds slice,
        std::shared_ptr<Progress> progress, std::unique_ptr<ReportChannel> channel);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  int rank() const { return rank_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  const std::shared_ptr<Wire>& wire() const { return wire_; }
  Timeline& timeline() { return timeline_; }
  Road& road() { return progress_->road; }
  int64_t store_messages() const { return channel_ ? channel_->messages() : 0; }

  // This rank is one of those who say what they do under this number (Ticket::circle).
  void belong(int64_t circle);

  // From now on a wait keeps its core this long, yielding it to whoever can run, before it sleeps. For backends that sleep
  // at once, where every rank has a core: one that slept comes back late, on virtual machines later than most waits take.
  void keep_core(std::chrono::milliseconds time) { keen_ = time; }

  // Returns when `work` has ended well. Otherwise an Error: the ranks that did not come within the time-out, a rank
  // that waits elsewhere for us (both would wait forever), a rank that failed, left or died.
  void wait(c10d::Work& work, const Where& where, const Ticket& ticket);

  // Counts a collective that was issued on `group`, and returns its number.
  int64_t count(int group) { return progress_->issued[group].fetch_add(1) + 1; }

  // Throws what this rank failed with before: after an error the groups are dead. Or what ends a world that is well.
  void check() {
    if (failed_.load(std::memory_order_acquire)) rethrow();
    if (const std::string* why = channel_ ? channel_->objection() : nullptr) raise(*why, {});
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Tells the other ranks that this one fails with `what`, which began at rank `origin`. The first call counts.
  void fail(const std::string& what, int origin, const Where& where, const Ticket& ticket = {});

  // Turns what a backend threw into an Error that names the rank at fault if it can be found out.
  [[noreturn]] void explain(const std::exception_ptr& thrown, const Where& where, const Ticket& ticket);

  // For what waits at the store alone: throws where another rank failed; with `is_gone`, also where one left, or has not
  // been heard of for long.
  enum class Silent { is_waited_for, is_gone };
  void look_around(const Where& where, Silent silent);

  // The orderly end of this rank's part.
  void leave();

 private:
  struct Vigil;
  void look(Vigil& vigil);
  bool awaits_us(const Report& report) const;
  bool belongs(int64_t circle) const;
  [[noreturn]] void raise(const std::string& message, const Where& where, const Ticket& ticket = {});
  [[noreturn]] void mourn(const std::vector<int>& dead, const Where& where);
  [[noreturn]] void follow(int other, const Report& report, const Where& where);
  [[noreturn]] void time_out(const Where& where, const Ticket& ticket, Clock::duration waited,
                             const std::string& cause);
  [[noreturn]] void rethrow() const;

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds slice_;
  std::chrono::milliseconds keen_{0};
  const std::shared_ptr<Progress> progress_;
  const std::unique_ptr<ReportChannel> channel_;
  const std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
  Timeline timeline_;
  std::atomic<int64_t> waits_{0};
  std::atomic<int> waiting_{0};  // threads of this rank in a long wait
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::string failure_;
  std::set<int64_t> circles_;
};

}  // namespace plumb

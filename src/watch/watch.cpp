// How a long wait is watched: slices of waiting, and between them a look at what the other ranks say.
#include "watch/watch.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

namespace plumb {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds patience{2'000};        // for an answer of the channel
constexpr milliseconds evidence_limit{3'000};  // how long a broken connection is looked into
constexpr milliseconds evidence_pause{100};
constexpr milliseconds silence{1'800};  // a heartbeat missing this long is a process gone

std::string seconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

// The first line: libtorch appends a stack.
std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    const std::string what = e.what();
    // Up to libtorch's stack, and to gloo's guess at a cause, which is ours to tell.
    return what.substr(0, std::min(what.find('\n'), what.find(". This is typically")));
  } catch (...) {
    return "an unknown exception";
  }
}

bool speaks_of_time(const std::string& text) {
  return text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
}

// Whether the wait of this ticket is for rank `rank`, among others.
bool needs(const Ticket& ticket, int rank) { return !ticket.members || std::ranges::count(*ticket.members, rank) > 0; }

bool same_place(const Where& a, const Where& b) { return a.kind == b.kind && a.step == b.step && a.pass == b.pass; }

// "is in backward 2 of step 5", "called step() after 1 backward".
std::string position(const Where& where, bool with_step) {
  switch (where.kind) {
    case Where::Kind::backward:
      return "is in backward " + std::to_string(where.pass) + " of step " + std::to_string(where.step);
    case Where::Kind::step:
      return "called step() " + (with_step ? "number " + std::to_string(where.step) + " " : std::string()) + "after " +
             backwards(where.pass);
    default:
      return "is in " + describe(where);
  }
}

constexpr const char* kGatherAlike =
    "; ranks that cannot read each other's memory gather what every rank uses, in the same order: use the same units "
    "on every rank, or let ranks ask before they gather (Options::ask_before_gathers, PLUMB_ASK_BEFORE_GATHERS=1)";

// Both wait for each other; says where, and what to do about it.
std::string crossed(const Where& mine, int other, const Where& theirs, bool one_gathers) {
  const bool same_step = mine.step == theirs.step;
  if (one_gathers) {
    return "waits in " + describe(mine) + ", but rank " + std::to_string(other) + " waits in " + describe(theirs) +
           kGatherAlike;
  }
  auto in_loop = [](const Where& w) { return w.kind == Where::Kind::backward || w.kind == Where::Kind::step; };
  if (in_loop(mine) && in_loop(theirs) && !same_place(mine, theirs)) {
    return position(mine, !same_step) + ", but rank " + std::to_string(other) + " " + position(theirs, !same_step) +
           "; every rank must run the same number of backwards before step() — a rank with nothing to do calls "
           "engine.backward(loss) all the same";
  }
  return "waits in " + describe(mine) + ", but rank " + std::to_string(other) + " waits in " + describe(theirs) +
         "; every rank must build its engines and call them in the same order";
}

// Of a rank that does not answer, behind what is said of it.
std::string last_seen(const Report& report) {
  const std::string last = describe(report.last);
  return last.empty() ? "" : ", last seen " + last;
}

constexpr int most_told = 8;  // ranks that wait as this one does, in one message

}  // namespace

// One long wait, from its first look on.
struct Watch::Vigil {
  struct Seen {
    int64_t crossed_wait = -1;  // the other's wait that crosses ours, at the last look
    bool left = false;          // had left without coming, at the last look
  };

  Watch& watch;
  const Where& where;
  const Ticket ticket;
  const Clock::time_point begin;
  bool open = false;
  int blind_looks = 0;
  std::vector<Seen> seen{};

  void publish() {
    if (open || !watch.channel_) return;
    open = true;
    seen.resize(watch.size_);
    ++watch.waiting_;
    Report report;
    report.state = Report::State::waiting;
    report.wait = ++watch.waits_;
    report.ticket = ticket;
    report.where = where;
    watch.channel_->publish(report);
  }

  ~Vigil() {
    if (!open) return;
    --watch.waiting_;
    if (!watch.failed()) watch.channel_->publish(Report{});
  }
};

Watch::Watch(int rank, int size, milliseconds timeout, milliseconds slice, std::shared_ptr<Progress> progress,
             std::unique_ptr<ReportChannel> channel)
    : rank_(rank), size_(size), timeout_(timeout), slice_(slice), progress_(std::move(progress)),
      channel_(std::move(channel)) {}

Watch::~Watch() = default;

void Watch::wait(c10d::Work& work, const Where& where, const Ticket& ticket) {
  Vigil vigil{*this, where, ticket, Clock::now()};
  for (const auto end = vigil.begin + keen_; Clock::now() < end && !work.isCompleted();) std::this_thread::yield();
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(vigil.begin + timeout_ - Clock::now());
    try {
      work.wait(std::clamp(left, milliseconds(1), slice_));
      return;
    } catch (...) {
      if (work.isCompleted()) {
        if (const std::exception_ptr thrown = work.exception()) explain(thrown, where, ticket);
        return;  // it ended between the slice and this line
      }
    }
    look(vigil);
    if (Clock::now() - vigil.begin >= timeout_) time_out(where, ticket, Clock::now() - vigil.begin, {});
  }
}

void Watch::belong(int64_t circle) {
  std::lock_guard lock(mutex_);
  circles_.insert(circle);
}

bool Watch::belongs(int64_t circle) const {
  std::lock_guard lock(mutex_);
  return circle == 0 || circles_.contains(circle);
}

bool Watch::awaits_us(const Report& report) const {
  const bool waits = report.state == Report::State::waiting || report.state == Report::State::failed;
  return waits && report.ticket.number > 0 && belongs(report.ticket.circle) && waiting_.load() == 1 &&
         progress_->issued[report.ticket.group].load() < report.ticket.number;
}

// A deadlock is certain, not guessed: the other rank waits for a collective that we have not issued, we wait for one
// that it has not issued, or both say different things of the same one; and a look later both still do.
void Watch::look(Vigil& vigil) {
  if (!channel_) return;
  check();
  vigil.publish();
  const auto heard = channel_->read(patience);
  if (!heard) {
    const std::string trouble = channel_->trouble();
    if (!trouble.empty() && ++vigil.blind_looks > 2) {
      raise("waits in " + describe(vigil.where) +
                ", and the store that the ranks met at is gone, with the process that "
                "hosts it (rank 0, unless the launcher does): " +
                trouble,
            vigil.where);
    }
    return;
  }
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Report& report = (*heard)[r].report;
    Vigil::Seen& seen = vigil.seen[r];
    const Ticket& mine = vigil.ticket;
    const Ticket& its = report.ticket;
    const bool needed = needs(mine, r);
    const bool absent = needed && report.issued[mine.group] < mine.number;
    const bool waits = report.state == Report::State::waiting || report.state == Report::State::failed;
    const bool differs = waits && needed && mine.what != its.what && mine.circle != 0 && mine.circle == its.circle &&
                         mine.group == its.group && mine.number == its.number;
    const bool cross = differs || (absent && awaits_us(report));
    const bool one_gathers = mine.group == gather_index || its.group == gather_index;
    if (report.state == Report::State::failed) {
      // It gave up a wait that crosses ours: say so from this side.
      if (cross) raise(crossed(vigil.where, r, report.where, one_gathers), vigil.where, vigil.ticket);
      follow(r, report, vigil.where);
    }
    if (report.state == Report::State::left && absent) {
      if (seen.left)
        raise("waits in " + describe(vigil.where) + " for rank " + std::to_string(r) +
                  ", which has left the world; every rank must take the same steps before its program ends",
              vigil.where);
      seen.left = true;
    }
    if (cross) {
      if (seen.crossed_wait == report.wait) {
        raise(crossed(vigil.where, r, report.where, one_gathers), vigil.where, vigil.ticket);
      }
      seen.crossed_wait = report.wait;
    } else {
      seen.crossed_wait = -1;
    }
  }
}

void Watch::look_around(const Where& where, Silent silent) {
  check();
  const auto heard = channel_ ? channel_->read(patience) : std::nullopt;
  if (!heard) return;
  std::string gone;
  for (int r = 0; r < size_; ++r) {
    const auto& [report, changed] = (*heard)[r];
    if (r == rank_) continue;
    if (report.state == Report::State::failed) follow(r, report, where);
    if (silent == Silent::is_waited_for) continue;
    if (report.state == Report::State::left) {
      raise("waits in " + describe(where) + " for rank " + std::to_string(r) + ", which has left the world", where);
    }
    if (Clock::now() - changed < silence) continue;
    gone += (gone.empty() ? "rank " : "; rank ") + std::to_string(r) +
            " is gone: its process was killed, crashed or hangs (last heard of " + seconds(Clock::now() - changed) +
            " ago" + last_seen(report) + ")";
  }
  if (!gone.empty()) raise(gone + "; this rank was in " + describe(where), where);
}

void Watch::explain(const std::exception_ptr& thrown, const Where& where, const Ticket& ticket) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& e) {  // our own backend's: complete as it is
    fail(e.what(), rank_, where);
    throw;
  } catch (const RanksGone& gone) {
    std::vector<int> ranks = gone.ranks;  // of the group
    for (int& rank : ranks) rank = ticket.members ? (*ticket.members)[static_cast<size_t>(rank)] : rank;
    mourn(ranks, where);
  } catch (...) {  // the backend's: looked into below
  }
  const std::string text = text_of(thrown);
  if (speaks_of_time(text)) time_out(where, ticket, timeout_, text);
  if (!channel_) raise("communication failed in " + describe(where) + ": " + text, where);

  const auto begin = Clock::now();
  while (Clock::now() - begin < evidence_limit) {
    const auto heard = channel_->read(patience);
    if (!heard) break;
    std::string gone;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto& [report, changed] = (*heard)[r];
      if (report.state == Report::State::failed) follow(r, report, where);
      if (report.state == Report::State::left) {
        if (!needs(ticket, r)) continue;
        raise("rank " + std::to_string(r) + " left the world while this rank was in " + describe(where) +
                  "; every rank must take the same steps before its program ends [" + text + "]",
              where);
      }
      if (Clock::now() - changed < silence) continue;
      gone += (gone.empty() ? "" : "; ");
      gone += "rank " + std::to_string(r) + " is gone: its process was killed, crashed or hangs (last heard of " +
              seconds(Clock::now() - changed) + " ago" + last_seen(report) + ")";
    }
    if (!gone.empty()) raise(gone + "; this rank was in " + describe(where) + " [" + text + "]", where);
    std::this_thread::sleep_for(evidence_pause);
  }
  if (const std::string trouble = channel_->trouble(); !trouble.empty()) {
    raise("rank 0 is gone, and with it the store that it hosts (or its launcher): " + trouble + "; this rank was in " +
              describe(where) + " [" + text + "]",
          where);
  }
  raise("lost the connection to another rank in " + describe(where) +
            ", though all still run; look for their errors, "
            "and check the network between them [" +
            text + "]",
        where);
}

// These processes have ended. Their last words say whether that is the cause, or the consequence of another's end.
void Watch::mourn(const std::vector<int>& dead, const Where& where) {
  const auto heard = channel_ ? channel_->read(patience) : std::nullopt;
  std::string silent;
  for (const int r : dead) {
    const auto state = heard ? (*heard)[r].report.state : Report::State::running;
    if (state == Report::State::failed || state == Report::State::left) continue;
    silent += (silent.empty() ? "rank " : "; rank ") + std::to_string(r) +
              " is gone: its process was killed or crashed" + (heard ? last_seen((*heard)[r].report) : "");
  }
  if (!silent.empty()) raise(silent + "; this rank was in " + describe(where), where);
  for (const int r : dead) {
    if ((*heard)[r].report.state == Report::State::failed) follow(r, (*heard)[r].report, where);
  }
  raise("waits in " + describe(where) + " for rank " + std::to_string(dead.front()) +
            ", which has left the world; every rank must take the same steps before its program ends",
        where);
}

void Watch::time_out(const Where& where, const Ticket& ticket, Clock::duration waited, const std::string& cause) {
  std::string message = "waited " + seconds(waited) + " in " + describe(where);
  const std::string tail = cause.empty() ? "" : " [" + cause + "]";
  const auto heard = channel_ ? channel_->read(patience) : std::nullopt;
  if (!heard) {
    const std::string trouble = channel_ ? channel_->trouble() : "";
    raise(message + ", and not every rank came within the time-out" +
              (trouble.empty() ? "" : "; rank 0 is gone, and with it the store: " + trouble) + tail,
          where);
  }
  std::string missing, waiting;
  int told = 0;
  for (int r = 0; r < size_; ++r) {
    const auto& [report, changed] = (*heard)[r];
    if (r == rank_) continue;
    if (report.state == Report::State::failed) follow(r, report, where);
    if (report.issued[ticket.group] >= ticket.number || !needs(ticket, r)) {
      if (report.state == Report::State::waiting && ++told <= most_told) {
        waiting += "; rank " + std::to_string(r) + " " + describe(report);
      }
      continue;
    }
    missing += (missing.empty() ? "" : "; ");
    missing += "rank " + std::to_string(r) + " did not come";
    if (channel_->beats()) missing += "; last heard of " + seconds(Clock::now() - changed) + " ago";
    missing += ": it " + describe(report);
  }
  for (int r = 0; r < size_ && missing.empty() && channel_->beats(); ++r) {
    const auto& [report, changed] = (*heard)[r];
    const auto silent = Clock::now() - changed;
    if (r == rank_ || silent < silence || report.state == Report::State::left || !needs(ticket, r)) continue;
    missing = "rank " + std::to_string(r) + " came, and was last heard of " + seconds(silent) +
              " ago: it is stopped or hangs" + last_seen(report);
  }
  if (missing.empty())
    missing =
        "every rank came, but the data did not: either to different engines (run their backwards and steps in one "
        "order on every rank), or the network is slow or broken (check it, or raise the time-out)";
  raise(message + ": " + missing + waiting + tail, where);
}

void Watch::follow(int other, const Report& report, const Where& where) {
  const int origin = report.origin >= 0 ? report.origin : other;
  const std::string text = without_prefix(report.message);
  // The text of an Error begins with the rank already.
  const std::string name = "rank " + std::to_string(other);
  const Consequence error(rank_,
                          name + " failed: " + (text.rfind(name + ": ", 0) == 0 ? text.substr(name.size() + 2) : text) +
                              " (this rank was in " + describe(where) + ")");
  fail(error.what(), origin, where);
  throw error;
}

void Watch::raise(const std::string& message, const Where& where, const Ticket& ticket) {
  const Error error(rank_, message);
  fail(error.what(), rank_, where, ticket);
  throw error;
}

void Watch::fail(const std::string& what, int origin, const Where& where, const Ticket& ticket) {
  {
    std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    failure_ = what;
    failed_.store(true, std::memory_order_release);
  }
  if (!channel_) return;
  Report report;
  report.state = Report::State::failed;
  report.ticket = ticket;
  report.where = where;
  report.origin = origin;
  report.message = what;
  channel_->publish(report);
}

void Watch::rethrow() const {
  std::lock_guard lock(mutex_);
  const std::string text = without_prefix(failure_);
  const std::string name = "rank " + std::to_string(rank_) + ": ";
  throw Consequence(
      rank_, "an earlier failure ended this world: " + (text.rfind(name, 0) == 0 ? text.substr(name.size()) : text));
}

void Watch::leave() {
  if (channel_) channel_->leave();
}

}  // namespace plumb

// The seeded scheduler, blocking, and the ranks that take turns.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <thread>

#include "sim/machine.h"

namespace plumb::sim {

bool Machine::can_run(const StreamState& stream) const {
  if (stream.queue.empty()) return false;
  const Task& head = stream.queue.front();
  return passed(head.after) && (!head.ready || head.ready());
}

int Machine::pick(const std::vector<int>& candidates) {
  const int any = candidates[random_() % candidates.size()];
  if (order_ == Order::uniform) return any;
  // Favourites starve the others; now and then one falls from grace.
  if (random_() % 24 == 0) streams_[any].priority = random_();
  int best = candidates.front();
  for (const int id : candidates) {
    if (streams_[id].priority > streams_[best].priority) best = id;
  }
  return best;
}

bool Machine::step() {
  if (running_ || pending_ == 0) return false;
  thread_local std::vector<int> candidates;
  candidates.clear();
  for (size_t id = 0; id < streams_.size(); ++id) {
    if (can_run(streams_[id])) candidates.push_back(static_cast<int>(id));
  }
  if (candidates.empty()) return false;
  StreamState& stream = streams_[candidates.size() == 1 ? candidates.front() : pick(candidates)];
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  --pending_;
  const auto place_in_order = (static_cast<uint64_t>(stream.device) << 32) + static_cast<uint64_t>(stream.index);
  statistics.order =
      (statistics.order ^ hash_of(sites_[task.site].operation) ^ (place_in_order * 0x9e3779b97f4a7c15ull)) *
      0x100000001b3ull;
  if (task.kernel) {
    running_ = place().in_kernel = true;
    at::AutoDispatchBelowADInplaceOrView below;
    const c10::AutoGradMode no_grad(false);
    try {
      task.kernel();
    } catch (const std::exception& error) {
      const std::string what = error.what();
      unthrown_faults_.push_back(faults.size());
      faults.push_back({site(task.site), what.substr(0, what.find('\n'))});
    }
    task.kernel = nullptr;  // what it held is freed as part of it
    running_ = place().in_kernel = false;
  }
  ++stream.done;
  progress();
  return true;
}

void Machine::step_if_mine() {
  if (!has_ranks() || place().rank >= 0 || place().chose_device) step();
}

std::string Machine::stuck_heads() const {
  std::string text;
  for (const StreamState& stream : streams_) {
    if (stream.queue.empty()) continue;
    const Task& head = stream.queue.front();
    const Site where = site(head.site);
    text += "\n  " + where.stream + " stands at " + where.operation;
    if (head.after.stream >= 0) text += " for " + describe_stream(head.after.stream);
    if (!where.scope.empty()) text += ", in " + where.scope;
    if (stream.queue.size() > 1) text += ", with " + std::to_string(stream.queue.size() - 1) + " behind it";
  }
  return text.empty() ? "\n  no stream has work" : text;
}

void Machine::run_until(int device, Lock& lock, const std::function<bool()>& done, const std::string& what) {
  ++statistics.host_syncs;
  progress();  // whoever blocks has run host code since, which others may wait for
  while (!done()) {
    if (step()) continue;
    const int rank = host_of(device);
    if (has_ranks() && alive_[rank]) {
      hand_over(rank, lock, what);
    } else {
      throw Error("deadlock on the simulated accelerator: the host waits for " + what +
                  ", and no stream can run; the heads of their queues:" + stuck_heads());
    }
  }
}

// Gives the turn to a rank that has not yet found itself stuck; when there is none, nobody can ever go on.
void Machine::hand_over(int rank, Lock& lock, const std::string& what) {
  stalled_.insert(rank);
  std::vector<int> others;
  bool anyone_outside = false;
  for (int r = 0; r < static_cast<int>(alive_.size()); ++r) {
    if (!alive_[r]) continue;
    anyone_outside |= outside_[r] != 0;
    if (!outside_[r] && !stalled_.count(r)) others.push_back(r);
  }
  if (!others.empty()) {
    switch_to(others[random_() % others.size()]);
    turn_changed_.wait(lock, [&] { return turn_ == rank; });
    return;
  }
  if (!anyone_outside) {
    throw Error(rank, "deadlock on the simulated accelerator: this rank waits for " + what +
                          ", and no rank and no stream can go on; the heads of the queues:" + stuck_heads());
  }
  switch_to(-1);
  turn_changed_.wait(lock, [&] { return turn_ == rank || (turn_ == -1 && !stalled_.count(rank)); });
  switch_to(rank);
}

void Machine::synchronize(int stream, Lock& lock) {
  const EventState here = record(stream);
  ++statistics.device_waits;
  run_until(device_of(stream), lock, [&] { return passed(here); }, describe_stream(stream));
  // The stream's clock may have grown meanwhile by promises that were kept, not by operations.
  host_learns(host_of(device_of(stream)), here.clock);
  throw_fault(device_of(stream));
}

void Machine::synchronize_event(const EventState& event, Lock& lock) {
  if (event.stream < 0 || event.generation != generation_) return;
  // A copy: another host may record it anew while this one waits.
  const EventState seen = event;  // NOLINT(performance-unnecessary-copy-initialization)
  ++statistics.device_waits;
  const int device = device_of(seen.stream);
  run_until(device, lock, [&] { return passed(seen); }, "an event of " + describe_stream(seen.stream));
  host_learns(host_of(device), seen.clock);
  throw_fault(device);
}

void Machine::throw_fault(int device) {
  for (size_t i = 0; i < unthrown_faults_.size(); ++i) {
    const Fault& fault = faults[unthrown_faults_[i]];
    if (fault.site.stream.find("of sim:" + std::to_string(device)) == std::string::npos) continue;
    unthrown_faults_.erase(unthrown_faults_.begin() + static_cast<int64_t>(i));
    throw Error("fault on the simulated accelerator in " + fault.site.operation + " on " + fault.site.stream +
                (fault.site.scope.empty() ? "" : ", in " + fault.site.scope) + ": " + fault.what);
  }
}

// ---- ranks ----

namespace {
at::Generator& default_generator() { return const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator()); }
}  // namespace

// Every rank sees its own default generator, as every process would: it is swapped with the turn.
void Machine::switch_to(int rank) {
  if (turn_ == rank) return;
  if (turn_ >= 0) generators_[turn_] = default_generator().get_state();
  turn_ = rank;
  if (rank >= 0) default_generator().set_state(generators_[rank]);
  turn_changed_.notify_all();
}

void Machine::begin_ranks(int n) {
  const Clock common = host(0).clock;
  alive_.assign(n, 1);
  outside_.assign(n, 0);
  callers_generator_ = default_generator().get_state();
  generators_.assign(n, callers_generator_);
  for (int r = 0; r < n; ++r) host_learns(r, common);
  progress();
  turn_ = -1;
  switch_to(static_cast<int>(random_() % n));
}

void Machine::take_turn(int rank, Lock& lock) {
  turn_changed_.wait(lock, [&] { return turn_ == rank; });
}

void Machine::end_rank(int rank) {
  alive_[rank] = 0;
  progress();
  std::vector<int> others;
  for (int r = 0; r < static_cast<int>(alive_.size()); ++r) {
    if (alive_[r] && !outside_[r]) others.push_back(r);
  }
  switch_to(others.empty() ? -1 : others[random_() % others.size()]);
}

void Machine::end_ranks() {
  Clock all;
  for (size_t r = 0; r < alive_.size(); ++r) all.join(host(static_cast<int>(r)).clock);
  default_generator().set_state(callers_generator_);
  alive_.clear();
  outside_.clear();
  turn_ = -1;
  host_learns(0, all);
}

void Machine::leave(int rank) {
  outside_[rank] = 1;
  std::vector<int> others;
  for (int r = 0; r < static_cast<int>(alive_.size()); ++r) {
    if (alive_[r] && !outside_[r]) others.push_back(r);
  }
  switch_to(others.empty() ? -1 : others[random_() % others.size()]);
}

void Machine::come_back(int rank, Lock& lock) {
  outside_[rank] = 0;
  progress();
  if (turn_ == -1) {
    switch_to(rank);
  } else {
    turn_changed_.notify_all();
    take_turn(rank, lock);
  }
}

}  // namespace plumb::sim

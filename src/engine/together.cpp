#include "engine/together.h"

#include <algorithm>

namespace plumb {

Task::Task(std::function<std::string()> work, Runs runs) {
  if (runs == Runs::at_once) {
    outcome_ = attempt(work);
    done_ = true;
    return;
  }
  thread_ = std::thread([this, work = std::move(work)] {
    Outcome outcome = attempt(work);
    std::lock_guard lock(mutex_);
    outcome_ = std::move(outcome);
    done_ = true;
    changed_.notify_all();
  });
}

Task::~Task() {
  if (thread_.joinable()) thread_.join();
}

bool Task::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

void Task::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

void Task::wait_for(std::chrono::milliseconds time) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [this] { return done_; });
}

std::optional<std::vector<std::string>> together(const World& world, const Task& mine, Wait wait, const Where& where) {
  using std::chrono::milliseconds;
  const milliseconds turn = std::clamp(world.timeout() / 4, milliseconds(1), milliseconds(1000));
  for (bool pending = true; pending;) {
    if (wait == Wait::yes) mine.wait_for(turn);
    const int64_t status = mine.done() ? 1 : 0;
    pending = false;
    for (const auto& theirs : exchange(world, std::span(&status, 1), where)) pending = pending || theirs[0] == 0;
    if (pending && wait == Wait::no) return std::nullopt;
  }
  return share_outcome(world, mine.outcome(), where);
}

}  // namespace plumb

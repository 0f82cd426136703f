#include "engine/together.h"

#include <algorithm>

#include "plumb/error.h"

namespace plumb {

Task::Task(std::function<std::string()> work)
    : thread_([this, work = std::move(work)] {
        std::string text, error;
        try {
          text = work();
        } catch (const std::exception& thrown) {
          error = thrown.what();
          if (error.empty()) error = "an unknown error";
        }
        std::lock_guard lock(mutex_);
        text_ = std::move(text);
        error_ = std::move(error);
        done_ = true;
        changed_.notify_all();
      }) {}

Task::~Task() { thread_.join(); }

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
  const auto texts = exchange_text(world, mine.error().empty() ? "+" + mine.text() : "-" + mine.error(), where);
  std::vector<std::string> all;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty() || texts[rank][0] != '+') {
      std::string why = texts[rank].empty() ? "" : texts[rank].substr(1);
      if (why.starts_with("plumb: ")) why.erase(0, 7);
      throw TaskError(where.detail + " failed" + (world.size() > 1 ? " on rank " + std::to_string(rank) : "") + ": " +
                      why);
    }
    all.push_back(texts[rank].substr(1));
  }
  return all;
}

}  // namespace plumb

// Work that takes as long as a disk takes, on all ranks at once: none of them is taken for lost meanwhile.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "world/group.h"

namespace plumb {

// One piece of work on a thread of its own. It ends with a text; what it throws is kept.
class Task {
 public:
  explicit Task(std::function<std::string()> work);
  ~Task();  // waits
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  bool done() const;
  void wait() const;
  void wait_for(std::chrono::milliseconds time) const;
  const std::string& text() const { return text_; }    // once it is done
  const std::string& error() const { return error_; }  // empty: it went well

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::string text_, error_;
  std::thread thread_;
};

enum class Wait { no, yes };

// A rank's work failed, and every rank knows: communication goes on.
class TaskError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Everybody's text once every rank's work is done; nothing while some is not (with Wait::no: right now). A TaskError on
// every rank names the first whose work failed. Collective.
std::optional<std::vector<std::string>> together(const World& world, const Task& mine, Wait wait, const Where& where);

}  // namespace plumb

// Work that takes as long as a disk takes, on all ranks at once: none of them is taken for lost meanwhile.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "world/outcome.h"

namespace plumb {

// One piece of work. It ends with a text; what it throws is kept.
class Task {
 public:
  enum class Runs { beside, at_once };  // on a thread of its own, or before the constructor ends
  explicit Task(std::function<std::string()> work, Runs runs = Runs::beside);
  ~Task();  // waits
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  bool done() const;
  void wait() const;
  void wait_for(std::chrono::milliseconds time) const;
  const Outcome& outcome() const { return outcome_; }  // once it is done

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  Outcome outcome_;
  std::thread thread_;
};

enum class Wait { no, yes };

// Everybody's text once every rank's work is done; nothing while some is not (with Wait::no: right now). A RankFailed on
// every rank names the first whose work failed. Collective.
std::optional<std::vector<std::string>> together(const World& world, const Task& mine, Wait wait, const Where& where);

}  // namespace plumb

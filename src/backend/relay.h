// A relay: a thread that waits for collectives in the order in which it was told of them, and does what follows each.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "watch/process.h"

namespace plumb {

class Relay {
 public:
  explicit Relay(const char* name) : name_(name) {}
  // What has not ended is failed.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // `then` is called, by the thread, with null once all of `works` have ended well, or with what went wrong. It may throw
  // nothing, and must not hold what owns this relay.
  void after(Works works, std::function<void(const std::exception_ptr&)> then);

  // Fails what has not ended, and all that comes. Returns when the thread has.
  void stop();

 private:
  struct Job {
    Works works;
    std::function<void(const std::exception_ptr&)> then;
  };
  // What the thread holds, too: in a forked process, which has not the thread, it stays.
  struct Shared {
    std::mutex mutex;  // guards what follows
    std::condition_variable wake;
    std::deque<Job> jobs;
    bool stop = false;
  };
  static void run(Shared& shared);
  static std::exception_ptr outcome(Shared& shared, const Works& works);
  static bool stopped(Shared& shared);

  const char* const name_;
  const OwnProcess process_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;
};

}  // namespace plumb

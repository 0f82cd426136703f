#include "backend/relay.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <utility>

namespace plumb {
namespace {

constexpr std::chrono::milliseconds slice{50};  // of a wait, before a look whether to stop

std::exception_ptr closed() {
  return std::make_exception_ptr(std::runtime_error("the group was closed before this collective ended"));
}

}  // namespace

int Relay::own_process() { return ::getpid(); }

Relay::~Relay() { stop(); }

void Relay::after(Works works, std::function<void(const std::exception_ptr&)> then) {
  {
    std::lock_guard lock(mutex_);
    if (!stop_) {
      jobs_.push_back({std::move(works), std::move(then)});
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      wake_.notify_all();
      return;
    }
  }
  then(closed());
}

void Relay::stop() {
  if (own_process() != process_) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Relay::stopped() {
  std::lock_guard lock(mutex_);
  return stop_;
}

std::exception_ptr Relay::outcome(const Works& works) {
  for (const auto& work : works) {
    for (bool ended = false; !ended;) {
      if (stopped()) return closed();
      try {
        ended = work->wait(slice);
      } catch (...) {
        if (!work->isCompleted()) continue;  // a slice has passed
        if (auto failure = work->exception()) return failure;
        ended = true;
      }
    }
  }
  return nullptr;
}

void Relay::run() {
  ::pthread_setname_np(::pthread_self(), name_);
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    const std::exception_ptr failure = outcome(job.works);
    job.works.clear();
    job.then(failure);
  }
}

}  // namespace plumb

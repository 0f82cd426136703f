#include "backend/relay.h"

#include <pthread.h>

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

Relay::~Relay() { stop(); }

void Relay::after(Works works, std::function<void(const std::exception_ptr&)> then) {
  {
    std::lock_guard lock(shared_->mutex);
    if (!shared_->stop) {
      shared_->jobs.push_back({std::move(works), std::move(then)});
      if (!thread_.joinable()) {
        thread_ = std::thread([shared = shared_, name = name_] {
          ::pthread_setname_np(::pthread_self(), name);
          run(*shared);
        });
      }
      shared_->wake.notify_all();
      return;
    }
  }
  then(closed());
}

void Relay::stop() {
  if (process_.left()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->wake.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Relay::stopped(Shared& shared) {
  std::lock_guard lock(shared.mutex);
  return shared.stop;
}

std::exception_ptr Relay::outcome(Shared& shared, const Works& works) {
  for (const auto& work : works) {
    for (bool ended = false; !ended;) {
      if (stopped(shared)) return closed();
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

void Relay::run(Shared& shared) {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(shared.mutex);
      shared.wake.wait(lock, [&] { return shared.stop || !shared.jobs.empty(); });
      if (shared.jobs.empty()) return;
      job = std::move(shared.jobs.front());
      shared.jobs.pop_front();
    }
    const std::exception_ptr failure = outcome(shared, job.works);
    job.works.clear();
    job.then(failure);
  }
}

}  // namespace plumb

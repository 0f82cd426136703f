// The calls of a `tcp` backend that are under way, and who moves them on: whoever waits for one, and a thread while nobody does.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/sockets.h"
#include "backend/verb.h"
#include "watch/process.h"

namespace plumb {

// The label of a message that is not part of a collective has this bit; others have verb and number of theirs.
constexpr uint64_t kMessage = uint64_t{1} << 63;

class TcpCalls;

// One call: steps, each with what must have come before it is done. A step that does something sends; such steps are taken in
// the order of the calls.
class TcpCall final : public c10d::Work {
 public:
  TcpCall(std::shared_ptr<TcpCalls> calls, int rank, c10d::OpType type) : Work(rank, type), calls_(std::move(calls)) {}

  struct Step {
    std::vector<Sockets::Ref> awaited;
    std::function<void()> then;
  };
  std::deque<Step> steps;
  std::vector<Sockets::Ref> rest;  // that must have ended before the call has

  // Under the lock. `first`: no call before this one has something to send. True when it has ended.
  bool advance(bool first);
  bool sends_later() const { return !steps.empty(); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  bool came(std::vector<Sockets::Ref>& refs) const;
  void end(std::exception_ptr failure);

  const std::shared_ptr<TcpCalls> calls_;
  std::atomic<bool> ended_{false};
};

// Lives as long as the backend and what it began: a call that nobody waits for ends all the same, also after the backend.
class TcpCalls : public std::enable_shared_from_this<TcpCalls> {
 public:
  using Call = c10::intrusive_ptr<TcpCall>;

  TcpCalls(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& address,
           std::chrono::microseconds patience, Names names);
  ~TcpCalls();
  TcpCalls(const TcpCalls&) = delete;
  TcpCalls& operator=(const TcpCalls&) = delete;

  // What follows, until close(), is for who holds this.
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  Sockets& sockets() { return sockets_; }
  // What errors call this rank.
  int me() const { return sockets_.names()[rank_]; }
  // A call that is waited for soon: a message between two ranks.
  Call begin(c10d::OpType type);
  // The next collective, and the label of its messages.
  struct Collective {
    Call call;
    uint64_t label;
  };
  Collective begin(Verb verb);
  // It has all its steps: from now on it is moved on, behind those issued before.
  Call issue(Call call);
  // What comes while this rank computes is to be moved on.
  void need_thread();

  // Ends what is under way, with an error.
  void close();
  // By the backend, at its end: nothing is begun any more.
  void leave();

 private:
  friend class TcpCall;
  // Whoever waits moves everything on. False when `end` was there first.
  bool drive(TcpCall& call, std::chrono::steady_clock::time_point end);
  void look(TcpCall& call);
  void move_on();
  void watch_alarm();  // the thread's
  void wake_thread();

  const int rank_;
  const std::chrono::microseconds patience_;
  const OwnProcess process_;  // a process that is forked has neither the thread nor a part in its messages
  std::mutex mutex_;          // guards what follows
  Sockets sockets_;
  std::deque<Call> calls_;    // that have not ended
  uint64_t number_ = 0;       // of collectives so far
  int waiting_ = 0;           // threads in a wait: they move everything on
  bool standing_by_ = false;  // the thread, while somebody waits
  bool left_ = false;         // the thread ends with the last call
  int woken_ = -1;            // an eventfd that ends the thread's sleep
  std::condition_variable stand_by_;
  std::thread thread_;
};

}  // namespace plumb

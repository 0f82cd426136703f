// Links: messages from one rank to another, over a backend that sends and receives by tags.
//
// What is made of them goes in rounds: the messages of a round begin at once, and the next round when they have come.
// Ranks whose calls differ in what they say they do never mix their messages: neither ends, and the watch tells why.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "watch/wire.h"

namespace plumb {

class Links {
 public:
  // `issuing` is held during every call of the backend.
  Links(c10::intrusive_ptr<c10d::Backend> backend, std::mutex& issuing, std::shared_ptr<Wire> wire, Cargo cargo);
  // Ends what is under way, with an error.
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Whether this backend has messages between two ranks.
  static bool offered_by(const c10d::Backend& backend);

  struct Message {
    int peer = 0;
    at::Tensor memory;  // contiguous, on the host
  };
  struct Round {
    std::vector<Message> sends, receives;
  };
  // The next round, once everything of the one before has come; a round of nothing is the end.
  using Script = std::function<Round()>;
  // `what`: a digest of what every rank must be about to do now. The first round begins before this returns.
  c10::intrusive_ptr<c10d::Work> start(Script script, uint64_t what);

 private:
  class Run;
  void post(Run& run);
  void work_off();  // the thread's

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex& issuing_;
  std::shared_ptr<Wire> wire_;
  const Cargo cargo_;
  const bool asks_;                  // messages can be asked whether they have come
  std::atomic<uint64_t> number_{0};  // of calls so far

  // A thread waits where they cannot.
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<c10::intrusive_ptr<Run>> queue_;
  c10::intrusive_ptr<Run> running_;
  bool stop_ = false;
};

// Scripts over `size` ranks; each writes its result before its last round ends.

// Everybody's block in rank order into `all` (size × block), in ⌈log₂ size⌉ rounds.
Links::Script spread(int rank, int size, const at::Tensor& block, const at::Tensor& all);
// `mine` becomes the combination of everybody's, the same bits on every rank, in ⌈log₂ size⌉ rounds, or one more where
// size is no power of two. `add(other)` combines `mine` with another's; commutative.
Links::Script combination(int rank, int size, const at::Tensor& mine, std::function<void(const at::Tensor&)> add);
// Everybody's `shard` into its part of `full`, in one round.
Links::Script direct_gather(int rank, int size, const at::Tensor& full, const at::Tensor& shard);

}  // namespace plumb

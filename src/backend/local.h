// The `local` backend: a c10d backend whose ranks are threads of one process.
//
// A collective completes when its last rank arrives; that rank's thread does the work in place, under no lock, and
// nobody needs to wait for it to happen. Sums are in rank order. A rank that fails or ends releases all others.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace plumb {

class LocalWork;

// One rank's call of one collective.
struct LocalCall {
  c10d::OpType op = c10d::OpType::UNKNOWN;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
  int64_t root = 0;
  std::vector<at::Tensor> inputs{};
  std::vector<at::Tensor> outputs{};
  std::vector<int64_t> input_splits{};   // all-to-all; elements
  std::vector<int64_t> output_splits{};  // all-to-all; elements
};

// Where the ranks of one group meet. Shared by their LocalBackends.
class LocalHub : public std::enable_shared_from_this<LocalHub> {
 public:
  // `names`: of its ranks in errors, where it is of some ranks of a world; by default their numbers here.
  LocalHub(int size, std::chrono::milliseconds timeout, std::vector<int> names = {});
  ~LocalHub();

  c10::intrusive_ptr<c10d::Work> arrive(int rank, LocalCall call);

  // Messages between two ranks, in the order of their sending by tag. What is sent is copied at once.
  c10::intrusive_ptr<c10d::Work> send(int rank, int to, int tag, const at::Tensor& message);
  c10::intrusive_ptr<c10d::Work> receive(int rank, int from, int tag, const at::Tensor& memory);

  // Rank `origin` failed: every pending and later collective throws on the others.
  void fail(int origin, const std::string& message);
  // Rank `rank` issues no more: collectives it did not take part in throw.
  void leave(int rank);

  // Ranks that have not come to collective `number`, as text.
  std::string missing(int64_t number);

  int size() const { return size_; }
  int name(int rank) const { return names_[static_cast<size_t>(rank)]; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  struct Slot;
  struct Mailbox;
  using Address = std::tuple<int, int, int>;  // from, to, tag
  using Failure = std::function<std::exception_ptr(int name)>;

  void run(Slot& slot) const;
  std::string mismatch(const Slot& slot, int rank) const;
  void die(std::unique_lock<std::mutex> lock, const Failure& failure);

  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::vector<int> names_;
  std::mutex mutex_;
  std::map<Address, Mailbox> mail_;  // that somebody waits for, or that waits for somebody
  std::deque<Slot> slots_;           // begun and not complete, oldest first
  int64_t first_ = 0;                // number of slots_.front()
  std::vector<int64_t> next_;        // by rank: number of its next collective
  std::vector<bool> gone_;           // by rank: has left
  Failure failure_;
};

c10::intrusive_ptr<c10d::Backend> make_local_backend(std::shared_ptr<LocalHub> hub, int rank);

}  // namespace plumb

// The meeting place of the `local` backend: slots that fill up rank by rank.
#include "backend/local.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "backend/arguments.h"
#include "backend/sum.h"
#include "watch/report.h"

namespace plumb {

class LocalWork final : public c10d::Work {
 public:
  LocalWork(std::shared_ptr<LocalHub> hub, int rank, c10d::OpType op) : Work(rank, op), hub_(std::move(hub)) {}

  // Work::finish, but in code that thread sanitizers see.
  void end(std::exception_ptr failure = nullptr) {
    {
      std::lock_guard lock(mutex_);
      completed_ = true;
      exception_ = std::move(failure);
    }
    cv_.notify_all();
  }
  void set_number(int64_t number) { number_ = number; }
  void set_peer(int peer) { peer_ = peer; }

  bool wait(std::chrono::milliseconds timeout) override {
    const auto limit = timeout == kNoTimeout ? hub_->timeout() : timeout;
    bool done = false;
    {
      std::unique_lock lock(mutex_);
      done = cv_.wait_for(lock, limit, [&] { return completed_; });
      if (done && exception_) std::rethrow_exception(exception_);
    }
    if (!done) {
      throw Error(hub_->name(rank_),
                  "waited " + std::to_string(limit.count()) + " ms in " + c10d::opTypeToString(opType_) + " for " +
                      (peer_ < 0 ? hub_->missing(number_) : "rank " + std::to_string(hub_->name(peer_))));
    }
    return true;
  }

 private:
  std::shared_ptr<LocalHub> hub_;
  int64_t number_ = 0;
  int peer_ = -1;  // of a message
};

namespace {

std::string name_of(c10d::OpType op) {
  switch (op) {
    case c10d::OpType::ALLREDUCE:
      return "all_reduce";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
    case c10d::OpType::REDUCE_SCATTER:
      return "reduce_scatter";
    case c10d::OpType::_ALLGATHER_BASE:
    case c10d::OpType::ALLGATHER:
      return "all_gather";
    case c10d::OpType::BROADCAST:
      return "broadcast";
    case c10d::OpType::ALLTOALL_BASE:
      return "all_to_all";
    case c10d::OpType::BARRIER:
      return "barrier";
    default:
      return c10d::opTypeToString(op);
  }
}

const char* name_of(c10d::ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::MAX:
      return "max";
    case c10d::ReduceOp::MIN:
      return "min";
    default:
      return "other";
  }
}

int64_t elements(const std::vector<at::Tensor>& tensors) {
  int64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.numel();
  return count;
}

bool reduces(c10d::OpType op) {
  return op == c10d::OpType::ALLREDUCE || op == c10d::OpType::_REDUCE_SCATTER_BASE ||
         op == c10d::OpType::REDUCE_SCATTER;
}

std::string describe(const LocalCall& call, const LocalHub& hub) {
  std::string text = name_of(call.op);
  if (reduces(call.op)) text += std::string("(") + name_of(call.reduction) + ")";
  if (call.op == c10d::OpType::BROADCAST) {
    text += " from rank " + std::to_string(hub.name(static_cast<int>(call.root)));
  }
  if (call.inputs.empty()) return text;
  return text + " of " + std::to_string(elements(call.inputs)) + " " + c10::toString(call.inputs[0].scalar_type());
}

bool agree(const LocalCall& a, const LocalCall& b) {
  if (a.op != b.op || a.root != b.root || a.reduction != b.reduction || a.inputs.empty() != b.inputs.empty())
    return false;
  if (a.inputs.empty()) return true;
  if (a.inputs[0].scalar_type() != b.inputs[0].scalar_type()) return false;
  return a.op == c10d::OpType::ALLTOALL_BASE || elements(a.inputs) == elements(b.inputs);
}

Reduction reduction_of(const LocalCall& call) {
  if (const auto known = arguments::reduction_of(call.reduction)) return *known;
  throw Error("the local backend reduces by sum, avg, max and min only");
}

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

void move_bytes(char* to, const char* from, int64_t count) {
  if (count > 0 && to != from) std::memmove(to, from, static_cast<size_t>(count));
}

// Part `index` of tensors that together hold `parts` equal ones: one flat tensor, or one tensor per part.
char* part(const std::vector<at::Tensor>& tensors, int64_t index, int64_t parts) {
  if (tensors.size() > 1 || parts == 1) return bytes_of(tensors[index]);
  return bytes_of(tensors[0]) + index * (static_cast<int64_t>(tensors[0].nbytes()) / parts);
}

void reduce_parts(const std::vector<LocalCall>& calls) {
  const int64_t size = static_cast<int64_t>(calls.size());
  const auto dtype = calls[0].inputs[0].scalar_type();
  std::vector<const void*> in(size);
  std::vector<void*> out(size);
  if (calls[0].op == c10d::OpType::ALLREDUCE) {
    for (int64_t r = 0; r < size; ++r) in[r] = out[r] = calls[r].inputs[0].data_ptr();
    reduce_in_order(in, out, calls[0].inputs[0].numel(), dtype, reduction_of(calls[0]));
    return;
  }
  for (int64_t owner = 0; owner < size; ++owner) {
    for (int64_t r = 0; r < size; ++r) in[r] = part(calls[r].inputs, owner, size);
    void* shard = calls[owner].outputs[0].data_ptr();
    reduce_in_order(in, std::span<void* const>(&shard, 1), calls[owner].outputs[0].numel(), dtype,
                    reduction_of(calls[0]));
  }
}

void gather(const std::vector<LocalCall>& calls) {
  const int64_t size = static_cast<int64_t>(calls.size());
  for (const auto& call : calls) {
    for (int64_t r = 0; r < size; ++r) {
      move_bytes(part(call.outputs, r, size), bytes_of(calls[r].inputs[0]),
                 static_cast<int64_t>(calls[r].inputs[0].nbytes()));
    }
  }
}

void all_to_all(const std::vector<LocalCall>& calls, const LocalHub& hub) {
  const size_t size = calls.size();
  const int64_t item = calls[0].inputs[0].element_size();
  for (size_t to = 0; to < size; ++to) {
    int64_t written = 0;
    for (size_t from = 0; from < size; ++from) {
      const int64_t count = calls[to].output_splits[from];
      if (calls[from].input_splits[to] != count) {
        throw Error("all_to_all: rank " + std::to_string(hub.name(static_cast<int>(from))) + " sends " +
                    std::to_string(calls[from].input_splits[to]) + " elements to rank " +
                    std::to_string(hub.name(static_cast<int>(to))) + ", which expects " + std::to_string(count));
      }
      int64_t read = 0;
      for (size_t r = 0; r < to; ++r) read += calls[from].input_splits[r];
      move_bytes(bytes_of(calls[to].outputs[0]) + written * item, bytes_of(calls[from].inputs[0]) + read * item,
                 count * item);
      written += count;
    }
  }
}

std::vector<int> everybody(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

// One collective, until its last rank arrives.
struct LocalHub::Slot {
  std::vector<LocalCall> calls;                      // by rank
  std::vector<c10::intrusive_ptr<LocalWork>> works;  // by rank; null: not yet arrived
  int arrived = 0;
};

// Of one sender, receiver and tag: messages that nobody asked for yet, or who waits for one.
struct LocalHub::Mailbox {
  struct Waiting {
    at::Tensor memory;
    c10::intrusive_ptr<LocalWork> work;
  };
  std::deque<at::Tensor> messages;
  std::deque<Waiting> waiting;
};

LocalHub::LocalHub(int size, std::chrono::milliseconds timeout, std::vector<int> names)
    : size_(size), timeout_(timeout), names_(names.empty() ? everybody(size) : std::move(names)), next_(size),
      gone_(size) {}
LocalHub::~LocalHub() = default;

void LocalHub::run(Slot& slot) const {
  std::exception_ptr thrown;
  try {
    const auto& calls = slot.calls;
    switch (calls[0].op) {
      case c10d::OpType::BARRIER:
        break;
      case c10d::OpType::BROADCAST:
        for (const auto& call : calls) {
          const auto& source = calls[calls[0].root].inputs[0];
          move_bytes(bytes_of(call.inputs[0]), bytes_of(source), static_cast<int64_t>(source.nbytes()));
        }
        break;
      case c10d::OpType::_ALLGATHER_BASE:
      case c10d::OpType::ALLGATHER:
        gather(calls);
        break;
      case c10d::OpType::ALLTOALL_BASE:
        all_to_all(calls, *this);
        break;
      default:
        reduce_parts(calls);
    }
  } catch (...) {
    thrown = std::current_exception();
  }
  slot.calls.clear();  // the tensors go before the waiters come
  for (const auto& work : slot.works) work->end(thrown);
}

std::string LocalHub::mismatch(const Slot& slot, int rank) const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank || !slot.works[r] || agree(slot.calls[r], slot.calls[rank])) continue;
    const int low = std::min(r, rank);
    const int high = std::max(r, rank);
    return "rank " + std::to_string(name(low)) + " called " + describe(slot.calls[low], *this) + " where rank " +
           std::to_string(name(high)) + " called " + describe(slot.calls[high], *this) +
           "; every rank must call the same collectives in the same order";
  }
  return {};
}

c10::intrusive_ptr<c10d::Work> LocalHub::arrive(int rank, LocalCall call) {
  std::unique_lock lock(mutex_);
  auto work = c10::make_intrusive<LocalWork>(shared_from_this(), rank, call.op);
  if (failure_) {
    work->end(failure_(name(rank)));
    return work;
  }
  const int64_t number = next_[rank]++;
  work->set_number(number);
  while (first_ + static_cast<int64_t>(slots_.size()) <= number) {
    slots_.emplace_back();
    slots_.back().calls.resize(size_);
    slots_.back().works.resize(size_);
  }
  Slot& slot = slots_[number - first_];
  slot.calls[rank] = std::move(call);
  slot.works[rank] = work;
  if (std::string text = mismatch(slot, rank); !text.empty()) {
    die(std::move(lock), [text](int r) { return std::make_exception_ptr(Error(r, text)); });
    return work;
  }
  for (int r = 0; r < size_; ++r) {
    if (!gone_[r] || next_[r] > number) continue;
    const std::string text = describe(slot.calls[rank], *this) + " can never complete: rank " +
                             std::to_string(name(r)) + " has ended its part; every rank must call the same collectives";
    die(std::move(lock), [text](int me) { return std::make_exception_ptr(Error(me, text)); });
    return work;
  }
  if (++slot.arrived < size_) return work;
  // Each rank arrives in order, so a full slot is the oldest one.
  Slot full = std::move(slots_.front());
  slots_.pop_front();
  ++first_;
  lock.unlock();
  run(full);
  return work;
}

namespace {

// What a receiver got, or why it does not fit.
std::exception_ptr hand_over(const at::Tensor& message, const at::Tensor& memory, int rank, int from) {
  if (message.nbytes() == memory.nbytes()) {
    move_bytes(bytes_of(memory), bytes_of(message), static_cast<int64_t>(message.nbytes()));
    return nullptr;
  }
  return std::make_exception_ptr(Error(rank, "a message of " + std::to_string(message.nbytes()) + " bytes from rank " +
                                                 std::to_string(from) + " where " + std::to_string(memory.nbytes()) +
                                                 " were expected"));
}

std::string never_comes(int from) {
  return "a message of rank " + std::to_string(from) + " can never come: rank " + std::to_string(from) +
         " has ended its part; every rank must call the same collectives";
}

}  // namespace

c10::intrusive_ptr<c10d::Work> LocalHub::send(int rank, int to, int tag, const at::Tensor& message) {
  auto work = c10::make_intrusive<LocalWork>(shared_from_this(), rank, c10d::OpType::SEND);
  std::unique_lock lock(mutex_);
  if (failure_) {
    work->end(failure_(name(rank)));
    return work;
  }
  const auto box = mail_.try_emplace({rank, to, tag}).first;
  work->end();
  if (box->second.waiting.empty()) {
    box->second.messages.push_back(message.clone());
    return work;
  }
  const Mailbox::Waiting first = std::move(box->second.waiting.front());
  box->second.waiting.pop_front();
  if (box->second.waiting.empty()) mail_.erase(box);
  lock.unlock();
  first.work->end(hand_over(message, first.memory, name(to), name(rank)));
  return work;
}

c10::intrusive_ptr<c10d::Work> LocalHub::receive(int rank, int from, int tag, const at::Tensor& memory) {
  auto work = c10::make_intrusive<LocalWork>(shared_from_this(), rank, c10d::OpType::RECV);
  work->set_peer(from);
  std::unique_lock lock(mutex_);
  if (failure_) {
    work->end(failure_(name(rank)));
    return work;
  }
  const auto box = mail_.try_emplace({from, rank, tag}).first;
  if (box->second.messages.empty()) {
    box->second.waiting.push_back({memory, work});
    if (gone_[from]) {
      die(std::move(lock),
          [text = never_comes(name(from))](int me) { return std::make_exception_ptr(Error(me, text)); });
    }
    return work;
  }
  const at::Tensor message = std::move(box->second.messages.front());
  box->second.messages.pop_front();
  if (box->second.messages.empty()) mail_.erase(box);
  lock.unlock();
  work->end(hand_over(message, memory, name(rank), name(from)));
  return work;
}

void LocalHub::die(std::unique_lock<std::mutex> lock, const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  std::deque<Slot> slots = std::move(slots_);
  slots_.clear();
  const std::map<Address, Mailbox> mail = std::exchange(mail_, {});
  lock.unlock();
  for (const auto& [address, box] : mail) {
    for (const auto& waiting : box.waiting) waiting.work->end(failure(name(std::get<1>(address))));
  }
  for (auto& slot : slots) {
    for (int r = 0; r < size_; ++r) {
      if (slot.works[r]) slot.works[r]->end(failure(name(r)));
    }
  }
}

void LocalHub::fail(int origin, const std::string& message) {
  const std::string text = "rank " + std::to_string(name(origin)) + " failed: " + without_prefix(message);
  die(std::unique_lock(mutex_), [text](int rank) { return std::make_exception_ptr(Consequence(rank, text)); });
}

void LocalHub::leave(int rank) {
  std::unique_lock lock(mutex_);
  gone_[rank] = true;
  for (const auto& [address, box] : mail_) {
    if (std::get<0>(address) != rank || box.waiting.empty()) continue;
    die(std::move(lock), [text = never_comes(name(rank))](int me) { return std::make_exception_ptr(Error(me, text)); });
    return;
  }
  if (first_ + static_cast<int64_t>(slots_.size()) <= next_[rank]) return;
  const Slot& slot = slots_[std::max<int64_t>(next_[rank] - first_, 0)];
  for (int r = 0; r < size_; ++r) {
    if (!slot.works[r]) continue;
    const std::string text = describe(slot.calls[r], *this) + " can never complete: rank " +
                             std::to_string(name(rank)) +
                             " has ended its part; every rank must call the same collectives";
    die(std::move(lock), [text](int me) { return std::make_exception_ptr(Error(me, text)); });
    return;
  }
}

std::string LocalHub::missing(int64_t number) {
  std::lock_guard lock(mutex_);
  std::string text;
  for (int r = 0; r < size_; ++r) {
    if (next_[r] > number) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(name(r));
  }
  return text.empty() ? "nobody" : text + ", which did not come";
}

}  // namespace plumb

#include "backend/links.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <bit>
#include <cstring>
#include <utility>

#include "backend/tcp.h"
#include "plumb/error.h"

namespace plumb {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// One call, from its first round to its last.
class Links::Run final : public c10d::Work {
 public:
  Run(Links& links, Script script, int tag) : script_(std::move(script)), links_(links), tag_(tag) {}

  // By whoever waits, where messages can be asked; otherwise the thread drives it, and this waits for the thread.
  bool wait(milliseconds timeout) override {
    const auto end = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    if (links_.asks_) {
      while (!advance()) {
        if (Clock::now() >= end) throw std::runtime_error("the wait gave up");
        await_one(end);
      }
    } else {
      std::unique_lock lock(mutex_);
      const auto ended = [&] { return completed_; };
      if (timeout == kNoTimeout) cv_.wait(lock, ended);
      if (!cv_.wait_until(lock, end, ended)) throw std::runtime_error("the wait gave up");
    }
    std::lock_guard lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  bool isCompleted() override { return links_.asks_ ? advance() : ended(); }

  std::exception_ptr exception() const override {
    std::lock_guard lock(mutex_);
    return exception_;
  }

  // As far as it can go without waiting. True when the last round has come, or one has failed.
  bool advance() {
    std::lock_guard driving(driving_);
    while (!ended()) {
      try {
        for (; arrived_ < under_way_.size(); ++arrived_) {
          if (!under_way_[arrived_]->isCompleted()) return false;
          if (const auto thrown = under_way_[arrived_]->exception()) std::rethrow_exception(thrown);
        }
        if (Clock::now() < arrival_) return false;
        next();
      } catch (...) {
        end(std::current_exception());
      }
    }
    return true;
  }

  // The thread's: to the end.
  void drive() {
    std::lock_guard driving(driving_);
    while (!ended()) {
      try {
        for (; arrived_ < under_way_.size(); ++arrived_) {
          if (!under_way_[arrived_]->wait() || aborted_) throw std::runtime_error("the group has ended");
        }
        std::this_thread::sleep_until(arrival_);
        next();
      } catch (...) {
        end(std::current_exception());
      }
    }
  }

  void next() {
    {
      std::lock_guard lock(links_.issuing_);
      under_way_.clear();
    }
    arrived_ = 0;
    round_ = script_();
    if (round_.sends.empty() && round_.receives.empty()) return end(nullptr);
    links_.post(*this);
  }

  void end(std::exception_ptr failure) {
    {
      std::lock_guard lock(mutex_);
      if (completed_) return;
      completed_ = true;
      exception_ = std::move(failure);
    }
    cv_.notify_all();
  }

  void abort() override {
    std::lock_guard lock(links_.issuing_);
    aborted_ = true;
    for (const auto& work : under_way_) work->abort();
  }

  bool ended() const {
    std::lock_guard lock(mutex_);
    return completed_;
  }

 private:
  friend class Links;

  // For what the next round waits for, or for the end of this slice.
  void await_one(Clock::time_point end) {
    c10::intrusive_ptr<c10d::Work> work;
    {
      std::lock_guard driving(driving_);
      if (arrived_ < under_way_.size()) work = under_way_[arrived_];
    }
    if (!work) return std::this_thread::sleep_until(std::min(end, arrival_));
    try {
      const auto left = std::min<Clock::duration>(end - Clock::now(), std::chrono::seconds(1));
      work->wait(std::max(milliseconds(1), std::chrono::ceil<milliseconds>(left)));
    } catch (const std::exception&) {  // not yet, or what exception() holds
    }
  }

  Script script_;
  Links& links_;
  const int tag_;
  std::mutex driving_;
  Round round_;
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way_;  // receives first
  size_t arrived_ = 0;
  Clock::time_point arrival_{};
  std::atomic<bool> aborted_{false};
};

Links::Links(c10::intrusive_ptr<c10d::Backend> backend, std::mutex& issuing, std::shared_ptr<Wire> wire, Cargo cargo)
    : backend_(std::move(backend)), issuing_(issuing), wire_(std::move(wire)), cargo_(cargo),
      asks_(backend_->getBackendName() != "gloo") {}

Links::~Links() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    if (running_) running_->abort();
    for (const auto& run : queue_) run->abort();
  }
  wake_.notify_all();
  thread_.join();
}

bool Links::offered_by(const c10d::Backend& backend) {
  const std::string name = backend.getBackendName();
  return name == "gloo" || name == "local" || name == "tcp" || name == "shm+tcp";
}

// The tag has room for 31 bits: one that no tag of the user's is likely to have, what kind of cargo, the number of the call,
// and what it does. The digest keeps calls apart that would not fit into each other's memory.
c10::intrusive_ptr<c10d::Work> Links::start(Script script, uint64_t what) {
  const uint64_t folded = (what ^ (what >> 22) ^ (what >> 44)) & 0x3fffff;
  const uint64_t number = number_++ & 0x7f;
  const auto tag = (uint64_t{1} << 30) | (cargo_ == Cargo::gather ? uint64_t{kGatherTag} : 0) | (number << 22) | folded;
  auto run = c10::make_intrusive<Run>(*this, std::move(script), static_cast<int>(tag));
  run->next();
  if (asks_ || run->ended()) return run;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(run);
    if (!thread_.joinable()) thread_ = std::thread([this] { work_off(); });
  }
  wake_.notify_all();
  return run;
}

// Receives first: what a rank sends finds its place then.
void Links::post(Run& run) {
  int64_t bytes = 0;
  {
    std::lock_guard lock(issuing_);
    for (Message& message : run.round_.receives) {
      std::vector<at::Tensor> memory{message.memory};
      run.under_way_.push_back(backend_->recv(memory, message.peer, run.tag_));
    }
    for (Message& message : run.round_.sends) {
      std::vector<at::Tensor> memory{message.memory};
      run.under_way_.push_back(backend_->send(memory, message.peer, run.tag_));
      bytes += static_cast<int64_t>(message.memory.nbytes());
    }
    if (run.aborted_) {
      for (const auto& work : run.under_way_) work->abort();
    }
  }
  wire_->sent(cargo_, 1, static_cast<int64_t>(run.round_.sends.size()), bytes);
  run.arrival_ = wire_->arrival(run.round_.receives.empty() ? 0 : 1, bytes);
}

void Links::work_off() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    running_ = std::move(queue_.front());
    queue_.pop_front();
    const auto run = running_;
    lock.unlock();
    run->drive();
    lock.lock();
    running_.reset();
  }
}

// ---- scripts

namespace {

at::Tensor blocks_of(const at::Tensor& all, int size, int first, int count) {
  const int64_t block = all.numel() / size;
  return all.narrow(0, first * block, count * block);
}

}  // namespace

// Bruck's: after round k every rank has the blocks of the 2^k ranks from itself on.
Links::Script spread(int rank, int size, const at::Tensor& block, const at::Tensor& all) {
  const at::Tensor turned = at::empty_like(all);  // from this rank's on
  blocks_of(turned, size, 0, 1).copy_(block);
  return [=, have = 1]() mutable -> Links::Round {
    if (have >= size) {
      for (int i = 0; i < size; ++i) blocks_of(all, size, (rank + i) % size, 1).copy_(blocks_of(turned, size, i, 1));
      return {};
    }
    const int distance = have;
    const int count = std::min(distance, size - distance);
    have += count;
    return {.sends = {{(rank - distance + size) % size, blocks_of(turned, size, 0, count)}},
            .receives = {{(rank + distance) % size, blocks_of(turned, size, distance, count)}}};
  };
}

// Recursive doubling among a power of two; each of the others is joined to one of these.
Links::Script combination(int rank, int size, const at::Tensor& mine, std::function<void(const at::Tensor&)> add) {
  const int doubling = static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
  const int others = size - doubling;
  enum class Phase { joining, doubling, answering, ended };
  struct State {
    Phase phase;
    int mask = 1;
    at::Tensor sent, received;
    bool adds = false;  // what was received
  };
  auto state = std::make_shared<State>();
  state->phase = others > 0 ? Phase::joining : Phase::doubling;
  state->received = at::empty_like(mine);
  return [=, add = std::move(add)]() -> Links::Round {
    if (std::exchange(state->adds, false)) add(state->received);
    if (state->phase == Phase::joining) {
      state->phase = rank < doubling ? Phase::doubling : Phase::answering;
      if (rank >= doubling) return {.sends = {{rank - doubling, mine}}, .receives = {}};
      if (rank < others) {
        state->adds = true;
        return {.sends = {}, .receives = {{rank + doubling, state->received}}};
      }
    }
    if (state->phase == Phase::doubling) {
      if (state->mask < doubling) {
        const int peer = rank ^ std::exchange(state->mask, state->mask * 2);
        state->sent = mine.clone();  // `mine` changes while it may still be on its way
        state->adds = true;
        return {.sends = {{peer, state->sent}}, .receives = {{peer, state->received}}};
      }
      state->phase = rank < others ? Phase::answering : Phase::ended;
    }
    if (std::exchange(state->phase, Phase::ended) == Phase::answering) {
      if (rank >= doubling) return {.sends = {}, .receives = {{rank - doubling, mine}}};
      return {.sends = {{rank + doubling, mine}}, .receives = {}};
    }
    return {};
  };
}

Links::Script direct_gather(int rank, int size, const at::Tensor& full, const at::Tensor& shard) {
  return [=, begun = false]() mutable -> Links::Round {
    if (std::exchange(begun, true)) return {};
    const at::Tensor own = blocks_of(full, size, rank, 1);
    if (own.data_ptr() != shard.data_ptr()) own.copy_(shard);
    Links::Round round;
    // Each its neighbour first, so that no rank is everybody's first.
    for (int i = 1; i < size; ++i) {
      round.receives.push_back({(rank + size - i) % size, blocks_of(full, size, (rank + size - i) % size, 1)});
      round.sends.push_back({(rank + i) % size, shard});
    }
    return round;
  };
}

}  // namespace plumb

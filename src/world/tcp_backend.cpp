// The c10d face of the `tcp` backend: what its collectives send to whom, and who moves it on.
//
// All ranks of a group send to each other directly, so that a collective is one round of messages, and an all-reduce two:
// everybody's numbers for a part go to its owner, who sums them in rank order, and sends the sum to everybody.
#include "world/tcp.h"

#include <ATen/ops/empty.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "plumb/error.h"
#include "world/arguments.h"
#include "world/report.h"
#include "world/round.h"
#include "world/sockets.h"

namespace plumb {
namespace {

using c10d::OpType;
using c10d::Work;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Lane = Sockets::Lane;
using Ref = Sockets::Ref;

constexpr int64_t kSlice = 2 << 20;  // bytes that are summed, and sent on, while the next ones come
constexpr milliseconds kLook{5};     // a sleeper's, while a peer is not there yet
constexpr uint64_t kMessage = uint64_t{1}
                              << 63;  // the label of a single message; others: verb and number of a collective

enum class Verb : uint64_t { all_reduce = 1, reduce_scatter, all_to_all, all_gather, broadcast, barrier };

const char* name_of(uint64_t verb) {
  switch (static_cast<Verb>(verb)) {
    case Verb::all_reduce:
      return "all_reduce";
    case Verb::reduce_scatter:
      return "reduce_scatter";
    case Verb::all_to_all:
      return "all_to_all";
    case Verb::all_gather:
      return "all_gather";
    case Verb::broadcast:
      return "broadcast";
    case Verb::barrier:
      return "barrier";
  }
  return "an unknown collective";
}

std::string first_line_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& e) {
    return first_line(e.what());
  }
}

class TcpBackend;

// One call: steps, each with what must have come before it is done. A step that does something sends; such steps are taken in
// the order of the calls.
class TcpWork final : public Work {
 public:
  TcpWork(c10::intrusive_ptr<TcpBackend> backend, int rank, OpType type)
      : Work(rank, type), backend_(std::move(backend)) {}

  struct Step {
    std::vector<Ref> awaited;
    std::function<void()> then;
  };
  std::deque<Step> steps;
  std::vector<Ref> rest;  // that must have ended before the call has

  // Under the backend's lock. `first`: no call before this one has something to send. True when it has ended.
  bool advance(bool first);
  bool sends_later() const { return !steps.empty(); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  bool isCompleted() override;
  bool wait(milliseconds timeout) override;

 private:
  bool came(std::vector<Ref>& refs) const;
  void end(std::exception_ptr failure);

  c10::intrusive_ptr<TcpBackend> backend_;
  std::atomic<bool> ended_{false};
};

class TcpBackend final : public c10d::Backend {
 public:
  TcpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& address,
             std::chrono::microseconds patience)
      : Backend(rank, size), patience_(patience), sockets_(store, rank, size, address) {
    sockets_.contradiction = contradiction;
  }
  ~TcpBackend() override { stop_thread(); }

  const std::string getBackendName() const override { return "tcp"; }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override;
  c10::intrusive_ptr<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

  void shutdown() override {
    if (forked()) return;
    std::lock_guard lock(mutex_);
    sockets_.close("this rank has ended its part");
    move_on();
  }

  // Whoever waits moves everything on. False when `end` was there first.
  bool drive(TcpWork& work, Clock::time_point end);
  void move_on();
  void look(TcpWork& work) {
    std::unique_lock lock(mutex_, std::try_to_lock);  // somebody else is moving already
    if (!lock.owns_lock()) return;
    move_on();
    if (!work.ended()) work.advance(false);
  }

 private:
  friend class TcpWork;
  using Call = c10::intrusive_ptr<TcpWork>;

  Call begin(OpType type);
  Call issue(Call call);  // under the lock
  Sockets::Span span_of(const std::vector<at::Tensor>& tensors) const;
  Lane lane_of(int tag);
  uint64_t label(Verb verb) { return (static_cast<uint64_t>(verb) << 56) | (number_ & 0xffffffffffffff); }
  using Spans = std::function<Sockets::Span(int rank)>;
  void exchange(TcpWork& call, uint64_t label, const Spans& from, const Spans& into);
  int peer(int rank) const;
  Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType dtype) const;
  static std::string contradiction(const Sockets::Transfer& expected, const Sockets::Head& came);

  // A child of the process that made this has neither its thread nor a part in its messages.
  bool forked() const { return ::getpid() != process_; }
  void need_thread();
  void stop_thread();
  void watch_alarm();

  const std::chrono::microseconds patience_;
  const pid_t process_ = ::getpid();
  const arguments::Checker check_{"the tcp backend", rank_, size_};
  std::mutex mutex_;  // guards what follows
  Sockets sockets_;
  std::deque<Call> calls_;    // that have not ended
  uint64_t number_ = 0;       // of collectives so far
  int waiting_ = 0;           // threads in a wait: they move everything on
  bool standing_by_ = false;  // the thread, while somebody waits
  bool stop_ = false;
  int stopped_ = -1;  // an eventfd that ends the thread's sleep
  std::condition_variable stand_by_;
  std::thread thread_;
};

// ---- one call

bool TcpWork::came(std::vector<Ref>& refs) const {
  std::erase_if(refs, [rank = rank_](const Ref& ref) {
    if (!ref->ended.load(std::memory_order_acquire)) return false;
    if (ref->failure.empty()) return true;
    if (ref->contradicted) throw Error(rank, ref->failure);
    throw std::runtime_error("the connection to " + ref->failure);
  });
  return refs.empty();
}

bool TcpWork::advance(bool first) {
  if (ended()) return true;
  try {
    while (!steps.empty()) {
      if (!first || !came(steps.front().awaited)) return false;
      const Step step = std::move(steps.front());
      steps.pop_front();
      step.then();
    }
    if (!came(rest)) return false;
    end(nullptr);
  } catch (...) {
    backend_->sockets_.close(first_line_of(std::current_exception()));  // nothing comes into its memory any more
    end(std::current_exception());
  }
  return true;
}

void TcpWork::end(std::exception_ptr failure) {
  {
    std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = std::move(failure);
  }
  steps.clear();
  rest.clear();
  ended_.store(true, std::memory_order_release);
}

bool TcpWork::isCompleted() {
  if (!ended()) backend_->look(*this);
  return ended();
}

bool TcpWork::wait(milliseconds timeout) {
  const auto end = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  if (!backend_->drive(*this, end)) throw std::runtime_error("the wait gave up");
  std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

// ---- who moves it on

void TcpBackend::move_on() {
  sockets_.move();
  bool first = true;
  for (const Call& call : calls_) {
    if (!call->advance(first)) first = first && !call->sends_later();
  }
  std::erase_if(calls_, [](const Call& call) { return call->ended(); });
}

bool TcpBackend::drive(TcpWork& work, Clock::time_point end) {
  if (work.ended()) return true;
  std::unique_lock lock(mutex_);
  ++waiting_;
  const auto sleepy = Clock::now() + patience_;
  while (!work.ended()) {
    move_on();
    work.advance(false);
    const auto now = Clock::now();
    if (work.ended() || now >= end) break;
    if (now < sleepy) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      continue;
    }
    std::vector<pollfd> wanted = sockets_.wanted();
    auto left = std::chrono::ceil<milliseconds>(std::min(end - now, Clock::duration(std::chrono::seconds(1))));
    if (sockets_.looks_for_peers()) left = std::min(left, kLook);
    lock.unlock();
    ::poll(wanted.data(), wanted.size(), static_cast<int>(left.count()));
    lock.lock();
  }
  --waiting_;
  if (waiting_ == 0 && standing_by_) stand_by_.notify_all();
  return work.ended();
}

// While nobody waits, what comes during a computation is moved on by a thread: sums, and what is sent after them.
void TcpBackend::need_thread() {
  if (thread_.joinable()) return;
  stopped_ = ::eventfd(0, EFD_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  ::epoll_ctl(sockets_.alarm(), EPOLL_CTL_ADD, stopped_, &event);
  thread_ = std::thread([this] { watch_alarm(); });
}

void TcpBackend::watch_alarm() {
  ::pthread_setname_np(::pthread_self(), "plumb_tcp");
  for (;;) {
    std::array<epoll_event, 16> events;
    const int rang = ::epoll_wait(sockets_.alarm(), events.data(), events.size(), -1);
    std::unique_lock lock(mutex_);
    standing_by_ = true;
    stand_by_.wait(lock, [&] { return waiting_ == 0 || stop_; });
    standing_by_ = false;
    if (stop_) return;
    move_on();
    for (int i = 0; i < rang; ++i) sockets_.heard(events[static_cast<size_t>(i)].data.ptr);
  }
}

void TcpBackend::stop_thread() {
  if (!thread_.joinable()) return;
  if (forked()) return thread_.detach();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stand_by_.notify_all();
  const uint64_t one = 1;
  (void)!::write(stopped_, &one, sizeof one);
  thread_.join();
  ::close(stopped_);
}

// ---- the calls

TcpBackend::Call TcpBackend::begin(OpType type) {
  return c10::make_intrusive<TcpWork>(c10::intrusive_ptr<TcpBackend>::reclaim_copy(this), rank_, type);
}

TcpBackend::Call TcpBackend::issue(Call call) {
  need_thread();
  calls_.push_back(call);
  move_on();
  return call;
}

// To each its part, and from each its own; neighbours first, so that no rank is everybody's first.
void TcpBackend::exchange(TcpWork& call, uint64_t label, const Spans& from, const Spans& into) {
  for (int i = 1; i < size_; ++i) {
    const int source = (rank_ + size_ - i) % size_;
    if (const auto span = into(source); span.bytes > 0) {
      call.rest.push_back(sockets_.receive(source, Lane::issued, label, span));
    }
  }
  for (int i = 1; i < size_; ++i) {
    const int target = (rank_ + i) % size_;
    if (const auto span = from(target); span.bytes > 0) {
      call.rest.push_back(sockets_.send(target, Lane::issued, label, span));
    }
  }
}

c10::intrusive_ptr<Work> TcpBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<int64_t>& output_splits,
                                                   std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) {
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  if (output.scalar_type() != input.scalar_type()) {
    throw Error(rank_, std::string("all_to_all from ") + c10::toString(input.scalar_type()) + " to " +
                           c10::toString(output.scalar_type()) + "; both must have one dtype");
  }
  const auto places = [](const at::Tensor& tensor, const std::vector<int64_t>& elements) {
    std::vector<Sockets::Span> all;
    char* place = static_cast<char*>(tensor.data_ptr());
    for (const int64_t count : elements) {
      const auto bytes = static_cast<size_t>(count) * tensor.element_size();
      all.push_back({tensor, place, bytes});
      place += bytes;
    }
    return all;
  };
  const auto from = places(input, check_.in_elements(input, input_splits));
  const auto into = places(output, check_.in_elements(output, output_splits));
  std::lock_guard lock(mutex_);
  ++number_;
  const Call call = begin(OpType::ALLTOALL_BASE);
  exchange(*call, label(Verb::all_to_all), [&](int r) { return from[r]; }, [&](int r) { return into[r]; });
  std::memcpy(into[rank_].place, from[rank_].place, from[rank_].bytes);
  return issue(call);
}

c10::intrusive_ptr<Work> TcpBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions&) {
  check_.divide(output, input);
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  char* const whole = static_cast<char*>(output.data_ptr());
  char* const mine = static_cast<char*>(input.data_ptr());
  const size_t bytes = input.nbytes();
  std::lock_guard lock(mutex_);
  ++number_;
  const Call call = begin(OpType::_ALLGATHER_BASE);
  exchange(
      *call, label(Verb::all_gather), [&](int) { return Sockets::Span{input, mine, bytes}; },
      [&](int r) { return Sockets::Span{output, whole + static_cast<size_t>(r) * bytes, bytes}; });
  if (char* const own = whole + static_cast<size_t>(rank_) * bytes; own != mine) std::memcpy(own, mine, bytes);
  return issue(call);
}

c10::intrusive_ptr<Work> TcpBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  const at::ScalarType dtype = tensor.scalar_type();
  const Reduction reduction = reduction_of(opts.reduceOp, dtype);
  const int64_t width = tensor.element_size();
  char* const base = static_cast<char*>(tensor.data_ptr());
  // The part of a rank, in elements, of a slice.
  struct Part {
    int64_t begin, count;
  };
  const int64_t slice = kSlice / width;
  const auto part = [size = size_, slice, numel = tensor.numel()](int64_t at, int r) {
    const int64_t count = std::min(slice, numel - at);
    const int64_t each = round_up((count + size - 1) / size, 16);
    const int64_t begin = std::min(count, r * each);
    return Part{at + begin, std::min(count, begin + each) - begin};
  };
  int64_t room = 0;  // of what others send for the parts of this rank
  for (int64_t at = 0; at < tensor.numel(); at += slice) room += part(at, rank_).count * (size_ - 1);
  const at::Tensor others = at::empty({room}, tensor.options());

  std::lock_guard lock(mutex_);
  ++number_;
  const Call call = begin(OpType::ALLREDUCE);
  const uint64_t name = label(Verb::all_reduce);
  const auto span = [=](const Part& where) {
    return Sockets::Span{tensor, base + where.begin * width, static_cast<size_t>(where.count * width)};
  };
  char* next = static_cast<char*>(others.data_ptr());
  for (int64_t at = 0; at < tensor.numel(); at += slice) {
    const Part own = part(at, rank_);
    TcpWork::Step step;
    std::vector<const void*> inputs(static_cast<size_t>(size_), span(own).place);
    for (int i = 1; i < size_; ++i) {
      const int source = (rank_ + size_ - i) % size_;
      if (own.count > 0) {
        const Sockets::Span its{others, next, span(own).bytes};
        step.awaited.push_back(sockets_.receive(source, Lane::issued, name, its));
        inputs[static_cast<size_t>(source)] = next;
        next += its.bytes;
      }
      if (const Part its = part(at, source); its.count > 0) {
        call->rest.push_back(sockets_.receive(source, Lane::deferred, name, span(its)));
      }
    }
    step.then = [this, inputs, others, own, span, name, dtype, reduction, call = call.get()] {
      if (own.count == 0) return;
      void* out = span(own).place;
      reduce_in_order(inputs, {&out, 1}, own.count, dtype, reduction);
      for (int i = 1; i < size_; ++i) {
        call->rest.push_back(sockets_.send((rank_ + i) % size_, Lane::deferred, name, span(own)));
      }
    };
    call->steps.push_back(std::move(step));
  }
  for (int64_t at = 0; at < tensor.numel(); at += slice) {
    for (int i = 1; i < size_; ++i) {
      const int target = (rank_ + i) % size_;
      const Part its = part(at, target);
      if (its.count > 0) call->rest.push_back(sockets_.send(target, Lane::issued, name, span(its)));
    }
  }
  return issue(call);
}

// Everybody's numbers for this rank's part come, and are summed.
c10::intrusive_ptr<Work> TcpBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::ReduceScatterOptions& opts) {
  check_.divide(input, output);
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  const Reduction reduction = reduction_of(opts.reduceOp, output.scalar_type());
  const size_t bytes = output.nbytes();
  const auto row = [bytes](const at::Tensor& of, int r) {
    return Sockets::Span{of, static_cast<char*>(of.data_ptr()) + static_cast<size_t>(r) * bytes, bytes};
  };
  const at::Tensor others = at::empty({output.numel() * size_}, output.options());  // this rank's row stays empty
  std::vector<const void*> inputs;
  for (int r = 0; r < size_; ++r) inputs.push_back(row(r == rank_ ? input : others, r).place);
  std::lock_guard lock(mutex_);
  ++number_;
  const Call call = begin(OpType::_REDUCE_SCATTER_BASE);
  exchange(
      *call, label(Verb::reduce_scatter), [&](int r) { return row(input, r); }, [&](int r) { return row(others, r); });
  // The output may be part of the input: nothing is written before everything was sent.
  call->steps.push_back({std::exchange(call->rest, {}), [inputs, others, input, output, reduction] {
                           void* out = output.data_ptr();
                           reduce_in_order(inputs, {&out, 1}, output.numel(), output.scalar_type(), reduction);
                         }});
  return issue(call);
}

// A binomial tree: who has it passes it on to ranks further and further away.
c10::intrusive_ptr<Work> TcpBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  const int root = static_cast<int>(opts.rootRank);
  peer(root);
  const int mine = (rank_ - root + size_) % size_;  // counted from the root
  const auto real = [this, root](int counted) { return (counted + root) % size_; };
  const Sockets::Span span{tensor, static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
  std::lock_guard lock(mutex_);
  ++number_;
  const Call call = begin(OpType::BROADCAST);
  const uint64_t name = label(Verb::broadcast);
  int reach = 1;  // the distance of the first that this rank passes it on to
  while (reach <= mine) reach *= 2;
  // The root sends when it begins, everybody else when it has come.
  const auto pass_on = [=, this, call = call.get()](Lane lane) {
    for (int distance = reach; mine + distance < size_; distance *= 2) {
      call->rest.push_back(sockets_.send(real(mine + distance), lane, name, span));
    }
  };
  if (mine == 0) {
    pass_on(Lane::issued);
  } else {
    const int parent = mine - reach / 2;
    const Lane lane = parent == 0 ? Lane::issued : Lane::deferred;
    call->steps.push_back({{sockets_.receive(real(parent), lane, name, span)}, [pass_on] { pass_on(Lane::deferred); }});
  }
  return issue(call);
}

// By doubling distances: after round k, a rank has heard of the 2^k before it.
c10::intrusive_ptr<Work> TcpBackend::barrier(const c10d::BarrierOptions&) {
  std::lock_guard lock(mutex_);
  ++number_;
  const Call call = begin(OpType::BARRIER);
  const uint64_t name = label(Verb::barrier);
  const at::Tensor word = at::empty({2}, at::kLong);
  const Sockets::Span out{word, static_cast<char*>(word.data_ptr()), sizeof(int64_t)};
  const Sockets::Span in{word, out.place + sizeof(int64_t), sizeof(int64_t)};
  for (int distance = 1; distance < size_; distance *= 2) {
    const Lane lane = distance == 1 ? Lane::issued : Lane::deferred;
    const Ref heard = sockets_.receive((rank_ + size_ - distance) % size_, lane, name, in);
    if (distance == 1) call->rest.push_back(sockets_.send((rank_ + 1) % size_, lane, name, out));
    call->steps.push_back({{heard}, [=, this, call = call.get()] {
                             if (distance * 2 >= size_) return;
                             const int target = (rank_ + distance * 2) % size_;
                             call->rest.push_back(sockets_.send(target, Lane::deferred, name, out));
                           }});
  }
  return issue(call);
}

// ---- messages between two ranks

c10::intrusive_ptr<Work> TcpBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  const Sockets::Span span = span_of(tensors);
  std::lock_guard lock(mutex_);
  const Call call = begin(OpType::SEND);
  call->rest.push_back(sockets_.send(peer(to), lane_of(tag), kMessage | static_cast<uint64_t>(tag), span));
  call->advance(true);
  return call;
}

c10::intrusive_ptr<Work> TcpBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  const Sockets::Span span = span_of(tensors);
  std::lock_guard lock(mutex_);
  const Call call = begin(OpType::RECV);
  call->rest.push_back(sockets_.receive(peer(from), lane_of(tag), kMessage | static_cast<uint64_t>(tag), span));
  return call;
}

Sockets::Span TcpBackend::span_of(const std::vector<at::Tensor>& tensors) const {
  const at::Tensor& tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  return {tensor, static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
}

// What is gathered comes while its rank computes; a host message is waited for.
Lane TcpBackend::lane_of(int tag) {
  if ((tag & kGatherTag) == 0) return Lane::control;
  need_thread();
  return Lane::gather;
}

// Refused here, before anybody waits for it.
Reduction TcpBackend::reduction_of(const c10d::ReduceOp& op, at::ScalarType dtype) const {
  const auto known = arguments::reduction_of(op);
  if (!known) throw Error(rank_, "the tcp backend reduces by sum, avg, max and min only");
  const void* in = nullptr;
  void* out = nullptr;
  try {
    reduce_in_order({&in, 1}, {&out, 1}, 0, dtype, *known);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(rank_,
                std::string("the tcp backend does not reduce ") + c10::toString(dtype) + "; reduce a numeric dtype");
  }
  return *known;
}

int TcpBackend::peer(int rank) const {
  if (rank >= 0 && rank < size_) return rank;
  throw Error(rank_, "a message to or from rank " + std::to_string(rank) + " in a group of " + std::to_string(size_));
}

// Who sends a message alone says what it is about, and the watch tells where both stand.
std::string TcpBackend::contradiction(const Sockets::Transfer& expected, const Sockets::Head& came) {
  if (((expected.label | came.label) & kMessage) != 0) return {};
  const auto told = [](uint64_t label, uint64_t bytes) {
    return std::string(name_of(label >> 56)) + " (number " + std::to_string(label & 0xffffffffffffff) + ", " +
           std::to_string(bytes) + " bytes of it)";
  };
  return "called " + told(came.label, came.bytes) + ", where this rank called " + told(expected.label, expected.bytes) +
         "; every rank must call the same collectives in the same order";
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_tcp_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   const std::string& address, std::chrono::microseconds patience) {
  return c10::make_intrusive<TcpBackend>(store, rank, size, address, patience);
}

}  // namespace plumb

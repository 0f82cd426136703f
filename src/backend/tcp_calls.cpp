#include "backend/tcp_calls.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backend/tcp.h"
#include "plumb/error.h"
#include "watch/report.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLook{5};  // a sleeper's, while a peer is not there yet

std::string first_line_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& e) {
    return first_line(e.what());
  }
}

// Who sends a message alone says what it is about, and the watch tells where both stand.
std::string contradiction(const Sockets::Transfer& expected, const Sockets::Head& came) {
  if (((expected.label | came.label) & kMessage) != 0) return {};
  const auto told = [](uint64_t label, uint64_t bytes) {
    return std::string(name_of(static_cast<Verb>((label >> 56) - 1))) + " (number " +
           std::to_string(label & 0xffffffffffffff) + ", " + std::to_string(bytes) + " bytes of it)";
  };
  return "called " + told(came.label, came.bytes) + ", where this rank called " + told(expected.label, expected.bytes) +
         "; every rank must call the same collectives in the same order";
}

}  // namespace

// ---- one call

bool TcpCall::came(std::vector<Sockets::Ref>& refs) const {
  std::erase_if(refs, [rank = calls_->me()](const Sockets::Ref& ref) {
    if (!ref->ended.load(std::memory_order_acquire)) return false;
    if (ref->failure.empty()) return true;
    if (ref->contradicted) throw Error(rank, ref->failure);
    throw std::runtime_error("the connection to " + ref->failure);
  });
  return refs.empty();
}

bool TcpCall::advance(bool first) {
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
    calls_->sockets().close(first_line_of(std::current_exception()));  // nothing comes into its memory any more
    end(std::current_exception());
  }
  return true;
}

void TcpCall::end(std::exception_ptr failure) {
  {
    std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = std::move(failure);
  }
  steps.clear();
  rest.clear();
  ended_.store(true, std::memory_order_release);
}

bool TcpCall::isCompleted() {
  if (!ended()) calls_->look(*this);
  return ended();
}

bool TcpCall::wait(milliseconds timeout) {
  const auto end = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  if (!calls_->drive(*this, end)) throw std::runtime_error("the wait gave up");
  std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

// ---- all of them

TcpCalls::TcpCalls(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& address,
                   std::chrono::microseconds patience, Names names)
    : rank_(rank), patience_(patience), sockets_(store, rank, size, address, std::move(names)) {
  sockets_.contradiction = contradiction;
}

TcpCalls::~TcpCalls() {
  if (woken_ >= 0) ::close(woken_);
}

TcpCalls::Call TcpCalls::begin(c10d::OpType type) {
  return c10::make_intrusive<TcpCall>(shared_from_this(), rank_, type);
}

TcpCalls::Collective TcpCalls::begin(Verb verb) {
  ++number_;
  return {begin(type_of(verb)), ((static_cast<uint64_t>(verb) + 1) << 56) | (number_ & 0xffffffffffffff)};
}

TcpCalls::Call TcpCalls::issue(Call call) {
  need_thread();
  calls_.push_back(call);
  move_on();
  return call;
}

void TcpCalls::close() {
  if (process_.left()) return;
  const auto entered = lock();
  sockets_.close("this rank has ended its part");
  move_on();
}

void TcpCalls::leave() {
  if (!thread_.joinable()) return;
  if (process_.left()) return thread_.detach();
  bool idle = false;
  {
    const auto entered = lock();
    left_ = true;
    idle = calls_.empty();
  }
  // The thread holds what it works on, and ends with the last call.
  if (!idle) return thread_.detach();
  wake_thread();
  thread_.join();
}

// ---- who moves it on

void TcpCalls::move_on() {
  sockets_.move();
  bool first = true;
  for (const Call& call : calls_) {
    if (!call->advance(first)) first = first && !call->sends_later();
  }
  std::erase_if(calls_, [](const Call& call) { return call->ended(); });
  if (left_ && calls_.empty()) wake_thread();
}

void TcpCalls::look(TcpCall& call) {
  std::unique_lock entered(mutex_, std::try_to_lock);  // somebody else is moving already
  if (!entered.owns_lock()) return;
  move_on();
  if (!call.ended()) call.advance(false);
}

bool TcpCalls::drive(TcpCall& call, Clock::time_point end) {
  if (call.ended()) return true;
  auto entered = lock();
  ++waiting_;
  const auto sleepy = Clock::now() + patience_;
  while (!call.ended()) {
    move_on();
    call.advance(false);
    const auto now = Clock::now();
    if (call.ended() || now >= end) break;
    if (now < sleepy) {
      entered.unlock();
      std::this_thread::yield();
      entered.lock();
      continue;
    }
    std::vector<pollfd> wanted = sockets_.wanted();
    auto left = std::chrono::ceil<milliseconds>(std::min(end - now, Clock::duration(std::chrono::seconds(1))));
    if (sockets_.looks_for_peers()) left = std::min(left, kLook);
    entered.unlock();
    ::poll(wanted.data(), wanted.size(), static_cast<int>(left.count()));
    entered.lock();
  }
  --waiting_;
  if (waiting_ == 0 && standing_by_) stand_by_.notify_all();
  return call.ended();
}

// While nobody waits, what comes during a computation is moved on by a thread: sums, and what is sent after them.
void TcpCalls::need_thread() {
  if (thread_.joinable()) return;
  woken_ = ::eventfd(0, EFD_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  ::epoll_ctl(sockets_.alarm(), EPOLL_CTL_ADD, woken_, &event);
  thread_ = std::thread([self = shared_from_this()] { self->watch_alarm(); });
}

void TcpCalls::watch_alarm() {
  ::pthread_setname_np(::pthread_self(), "plumb_tcp");
  for (;;) {
    std::array<epoll_event, 16> events;
    const int rang = ::epoll_wait(sockets_.alarm(), events.data(), events.size(), -1);
    auto entered = lock();
    standing_by_ = true;
    stand_by_.wait(entered, [&] { return waiting_ == 0 || (left_ && calls_.empty()); });
    standing_by_ = false;
    move_on();
    if (left_ && calls_.empty()) return;
    for (int i = 0; i < rang; ++i) sockets_.heard(events[static_cast<size_t>(i)].data.ptr);
  }
}

void TcpCalls::wake_thread() {
  const uint64_t one = 1;
  (void)!::write(woken_, &one, sizeof one);
  stand_by_.notify_all();
}

}  // namespace plumb

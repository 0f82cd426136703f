#include "backend/sockets.h"

#include <ATen/ops/empty.h>
#include <arpa/inet.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookAgain{2};  // for a peer that does not listen yet
constexpr int kGreetingMagic = 0x504c4d42;

struct Greeting {
  uint64_t secret = 0;
  uint32_t magic = kGreetingMagic;
  int32_t rank = -1;
  uint32_t lane = 0;
  uint32_t unused = 0;
};

[[noreturn]] void throw_errno(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

Address address_of(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    throw std::runtime_error("the address " + host + " cannot be used: " + gai_strerror(error));
  }
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

int port_of(int fd) {
  sockaddr_storage mine{};
  socklen_t length = sizeof mine;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &length) != 0) throw_errno("a socket has no port");
  return ntohs(mine.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&mine)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&mine)->sin_port);
}

void send_at_once(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string key_of(int rank) { return "socket/" + std::to_string(rank); }

}  // namespace

struct Sockets::Line {
  enum class State { looking, expecting, connecting, open, broken } state = State::expecting;
  int peer = 0;
  Lane lane = Lane::control;
  int fd = -1;
  std::deque<Ref> sends, receives;
  Head in;
  size_t got = 0;        // of `in`
  bool stalled = false;  // what came is not what is expected
  bool busy = false;
  uint32_t armed = 0;
  std::string failure;

  bool wants() const { return !sends.empty() || (!receives.empty() && !stalled); }
  ~Line() {
    if (fd >= 0) ::close(fd);
  }
};

struct Sockets::Guest {
  int fd = -1;
  Greeting greeting;
  size_t got = 0;
};

Sockets::Sockets(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& address, Names names)
    : store_(std::move(store)), rank_(rank), size_(size), names_(std::move(names)),
      lines_(static_cast<size_t>(size) * kLanes) {
  const Address mine = address_of(address, 0);
  // What throws here has no destructor.
  auto undo = c10::make_scope_exit([this] {
    for (const int fd : {listener_, alarm_}) {
      if (fd >= 0) ::close(fd);
    }
  });
  listener_ = ::socket(mine.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  alarm_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (listener_ < 0 || alarm_ < 0) throw_errno("no socket");
  if (::bind(listener_, reinterpret_cast<const sockaddr*>(&mine.storage), mine.length) != 0 ||
      ::listen(listener_, std::max(128, size * kLanes)) != 0) {
    throw_errno("cannot listen at " + address);
  }
  if (::getrandom(&secret_, sizeof secret_, 0) != sizeof secret_) throw_errno("no random number");
  store_->set(key_of(rank), std::to_string(port_of(listener_)) + " " + std::to_string(secret_) + " " + address);
  undo.release();
}

Sockets::~Sockets() {
  for (const Guest& guest : guests_) ::close(guest.fd);
  if (listener_ >= 0) ::close(listener_);
  if (alarm_ >= 0) ::close(alarm_);
}

Sockets::Line& Sockets::line(int peer, Lane lane) {
  auto& line = lines_[static_cast<size_t>(peer) * kLanes + static_cast<size_t>(lane)];
  if (!line) {
    line = std::make_unique<Line>();
    line->peer = peer;
    line->lane = lane;
    // The later rank connects to the earlier one. Both use a line at some time, or nobody gets anything from it.
    if (!closed_.empty()) {
      line->state = Line::State::broken;
      line->failure = closed_;
    } else if (peer < rank_) {
      line->state = Line::State::looking;
      ++looking_;
      look_for(*line);
    } else {
      ++expecting_;
    }
  }
  if (!line->busy) {
    line->busy = true;
    busy_.push_back(line.get());
  }
  return *line;
}

void Sockets::look_for(Line& line) {
  try {
    if (!store_->check({key_of(line.peer)})) {
      next_look_ = Clock::now() + kLookAgain;
      return;
    }
    std::istringstream text(store_->get_to_str(key_of(line.peer)));
    int port = 0;
    Greeting greeting;
    std::string host;
    text >> port >> greeting.secret >> host;
    greeting.rank = rank_;
    greeting.lane = static_cast<uint32_t>(line.lane);
    --looking_;
    line.state = Line::State::connecting;
    const Address there = address_of(host, port);
    line.fd = ::socket(there.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (line.fd < 0) throw_errno("no socket");
    send_at_once(line.fd);
    if (::connect(line.fd, reinterpret_cast<const sockaddr*>(&there.storage), there.length) != 0 &&
        errno != EINPROGRESS) {
      throw_errno("cannot connect to " + host + ":" + std::to_string(port));
    }
    // The first that travels on it, without a head.
    const at::Tensor hello = at::empty({static_cast<int64_t>(sizeof greeting)}, at::kByte);
    std::memcpy(hello.data_ptr(), &greeting, sizeof greeting);
    const Ref first = transfer(0, {hello, static_cast<char*>(hello.data_ptr()), sizeof greeting});
    first->moved = sizeof(Head);
    line.sends.push_front(first);
  } catch (const std::exception& e) {
    fail(line, std::string("could not be made: ") + e.what());
  }
}

Sockets::Ref Sockets::transfer(uint64_t label, const Span& span) {
  auto transfer = std::make_shared<Transfer>();
  transfer->label = label;
  transfer->memory = span.memory;
  transfer->place = span.place;
  transfer->bytes = span.bytes;
  return transfer;
}

Sockets::Ref Sockets::send(int peer, Lane lane, uint64_t label, const Span& from) {
  Line& to = line(peer, lane);
  const Ref sent = to.sends.emplace_back(transfer(label, from));
  step(to);
  return sent;
}

Sockets::Ref Sockets::receive(int peer, Lane lane, uint64_t label, const Span& into) {
  Line& from = line(peer, lane);
  const Ref received = from.receives.emplace_back(transfer(label, into));
  if (from.state == Line::State::broken) fail(from, from.failure);
  arm(from);
  return received;
}

void Sockets::close(const std::string& why) {
  closed_ = why;
  for (const auto& one : lines_) {
    if (one && one->state != Line::State::broken) fail(*one, why);
  }
}

void Sockets::move() {
  if (expecting_ > 0) accept_guests();
  if (looking_ > 0 && Clock::now() >= next_look_) {
    for (Line* one : busy_) {
      if (one->state == Line::State::looking) look_for(*one);
    }
  }
  // Where there are many, one call tells which of them are worth a call each.
  constexpr size_t kFew = 8;
  if (busy_.size() > kFew) {
    std::vector<pollfd> ready;
    std::vector<Line*> asked;
    for (Line* one : busy_) {
      if (one->fd < 0 || !one->wants()) continue;
      const bool writes = !one->sends.empty();
      ready.push_back({one->fd, static_cast<short>((writes ? POLLOUT : 0) | (one->receives.empty() ? 0 : POLLIN)), 0});
      asked.push_back(one);
    }
    if (::poll(ready.data(), ready.size(), 0) > 0) {
      for (size_t i = 0; i < ready.size(); ++i) {
        if (ready[i].revents != 0) step(*asked[i]);
      }
    }
  } else {
    for (size_t i = 0; i < busy_.size(); ++i) step(*busy_[i]);
  }
  std::erase_if(busy_, [](Line* one) { return !(one->busy = one->wants()); });
}

// Who connects says who it is, and that it knows the secret; anybody else is sent away.
void Sockets::accept_guests() {
  for (;;) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) return let_nobody_in(errno);
      break;
    }
    send_at_once(fd);
    guests_.push_back({fd, {}, 0});
  }
  for (Guest& guest : guests_) {
    char* place = reinterpret_cast<char*>(&guest.greeting);
    const ssize_t got = ::recv(guest.fd, place + guest.got, sizeof guest.greeting - guest.got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got > 0) guest.got += static_cast<size_t>(got);
    if (got > 0 && guest.got < sizeof guest.greeting) continue;
    const Greeting& said = guest.greeting;
    const bool known = got > 0 && said.magic == kGreetingMagic && said.secret == secret_ && said.rank > rank_ &&
                       said.rank < size_ && said.lane < kLanes;
    Line* expected = known ? &line(said.rank, static_cast<Lane>(said.lane)) : nullptr;
    if (expected == nullptr || expected->state != Line::State::expecting) {
      ::close(guest.fd);
    } else {
      --expecting_;
      expected->fd = guest.fd;
      expected->state = Line::State::open;
    }
    guest.fd = -1;
  }
  std::erase_if(guests_, [](const Guest& guest) { return guest.fd < 0; });
}

// Whoever wants to come has to wait for room that nobody makes.
void Sockets::let_nobody_in(int error) {
  for (const auto& one : lines_) {
    if (one && one->state == Line::State::expecting) {
      fail(*one, std::string("could not be made: no socket: ") + std::strerror(error));
    }
  }
}

bool Sockets::connected(Line& line) {
  pollfd one{line.fd, POLLOUT, 0};
  if (::poll(&one, 1, 0) <= 0) return false;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(line.fd, SOL_SOCKET, SO_ERROR, &error, &length);
  if (error == 0) {
    line.state = Line::State::open;
    return true;
  }
  fail(line, std::string("could not be made: ") + std::strerror(error));
  return false;
}

void Sockets::step(Line& line) {
  if (line.state == Line::State::connecting && !connected(line)) return arm(line);
  if (line.state == Line::State::open) write(line);
  if (line.state == Line::State::open) read(line);
  if (line.state == Line::State::broken) fail(line, line.failure);  // what was added since
  arm(line);
}

void Sockets::write(Line& line) {
  while (!line.sends.empty()) {
    Transfer& one = *line.sends.front();
    Head head{one.label, one.bytes};
    std::array<iovec, 2> parts{};
    int count = 0;
    if (one.moved < sizeof head) {
      parts[count++] = {reinterpret_cast<char*>(&head) + one.moved, sizeof head - one.moved};
    }
    const size_t done = one.moved < sizeof head ? 0 : one.moved - sizeof head;
    if (done < one.bytes) parts[count++] = {one.place + done, one.bytes - done};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t sent = ::sendmsg(line.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return;
      return fail(line, std::string("broke: ") + std::strerror(errno));
    }
    one.moved += static_cast<size_t>(sent);
    if (one.moved < sizeof head + one.bytes) continue;
    one.ended.store(true, std::memory_order_release);
    line.sends.pop_front();
  }
}

void Sockets::read(Line& line) {
  while (!line.receives.empty() && !line.stalled) {
    Transfer& one = *line.receives.front();
    const bool head = line.got < sizeof line.in;
    char* place = head ? reinterpret_cast<char*>(&line.in) + line.got : one.place + one.moved;
    const size_t room = head ? sizeof line.in - line.got : one.bytes - one.moved;
    if (room > 0) {
      const ssize_t got = ::recv(line.fd, place, room, MSG_DONTWAIT);
      if (got < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN) return;
        return fail(line, std::string("broke: ") + std::strerror(errno));
      }
      if (got == 0) return fail(line, "was closed by it");
      (head ? line.got : one.moved) += static_cast<size_t>(got);
    }
    if (line.got < sizeof line.in) continue;
    if (head && (line.in.label != one.label || line.in.bytes != one.bytes)) {
      const std::string why = contradiction ? contradiction(one, line.in) : "";
      if (!why.empty()) return fail(line, why, Cause::contradiction);
      line.stalled = true;
      return;
    }
    if (one.moved < one.bytes) continue;
    line.got = 0;
    one.ended.store(true, std::memory_order_release);
    line.receives.pop_front();
  }
}

void Sockets::fail(Line& line, const std::string& why, Cause cause) {
  if (line.state == Line::State::expecting) --expecting_;
  if (line.state == Line::State::looking) --looking_;
  line.state = Line::State::broken;
  line.failure = why;
  // The other side hears of it at once, though a process that was forked may have the connection open, too.
  if (line.fd >= 0) {
    ::shutdown(line.fd, SHUT_RDWR);
    ::close(std::exchange(line.fd, -1));
  }
  line.armed = 0;
  for (auto* list : {&line.sends, &line.receives}) {
    for (const Ref& one : *list) {
      one->failure = names_.rank(line.peer) + " " + why;
      one->contradicted = cause == Cause::contradiction;
      one->ended.store(true, std::memory_order_release);
    }
    list->clear();
  }
}

std::vector<pollfd> Sockets::wanted() const {
  std::vector<pollfd> all;
  if (expecting_ > 0) all.push_back({listener_, POLLIN, 0});
  for (const Guest& guest : guests_) all.push_back({guest.fd, POLLIN, 0});
  for (const Line* one : busy_) {
    if (one->fd < 0) continue;
    short events = one->sends.empty() && one->state != Line::State::connecting ? 0 : POLLOUT;
    if (!one->receives.empty() && !one->stalled) events = static_cast<short>(events | POLLIN);
    if (events != 0) all.push_back({one->fd, events, 0});
  }
  return all;
}

// Once per event: what nobody has a place for yet must not ring for ever.
void Sockets::arm(Line& line) {
  if (line.lane == Lane::control || line.fd < 0) return;
  uint32_t events = 0;
  if (line.state == Line::State::connecting || !line.sends.empty()) events |= EPOLLOUT;
  if (!line.receives.empty() && !line.stalled) events |= EPOLLIN;
  if (events == (line.armed & (EPOLLIN | EPOLLOUT))) return;
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.ptr = &line;
  ::epoll_ctl(alarm_, line.armed == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, line.fd, &event);
  line.armed = events | EPOLLONESHOT;
}

void Sockets::heard(void* line) {
  if (line == nullptr) return;  // whoever only wakes the thread
  Line& one = *static_cast<Line*>(line);
  one.armed = EPOLLONESHOT;
  arm(one);
}

}  // namespace plumb

// Claims in a store: the first of each kind stands, and whoever contradicts it tells everybody.
#include "world/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "watch/bounded.h"
#include "watch/report.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds recognition{2'000};  // for whoever serves the port to say that it is one of us
constexpr int client_tries = 3;             // connections within the time to join
constexpr milliseconds linger{2'000};       // of the store's host, for the others to read why there is no world

constexpr const char* verdict_key = "verdict";
constexpr const char* objection_key = "objection";
constexpr const char* stranger_key = "stranger";
constexpr const char* told_key = "told";
constexpr const char* settled = "settled";

std::string claim_key(int rank) { return "claim/" + std::to_string(rank); }

// What a process says of itself. Every process's is its own: two of one rank differ in where they run.
struct Claim {
  int rank = 0;
  int size = 0;
  int pid = 0;
  std::string told;  // "WORLD_SIZE=3"
  std::string host;
  std::string job;  // empty: the launcher has no name for it

  static Claim of(const Place& place) {
    char host[256] = "?";
    gethostname(host, sizeof host - 1);
    return {place.rank, place.size, getpid(), place.size_variable + "=" + std::to_string(place.size), host, place.job};
  }

  std::string encode() const {
    std::ostringstream out;
    out << rank << '\n' << size << '\n' << pid << '\n' << told << '\n' << host << '\n' << job << '\n';
    return out.str();
  }
  static Claim decode(const std::string& text) {
    Claim claim;
    std::istringstream in(text);
    (in >> claim.rank >> claim.size >> claim.pid).ignore();
    std::getline(in, claim.told);
    std::getline(in, claim.host);
    std::getline(in, claim.job);
    return claim;
  }

  std::string process() const { return "process " + std::to_string(pid) + " on " + host; }
  std::string name() const { return "rank " + std::to_string(rank) + " (" + process() + ")"; }
};

std::string seconds(milliseconds time) {
  return std::to_string(static_cast<double>(time.count()) / 1000).substr(0, 4) + " s";
}

// Whether anybody takes connections there.
bool listens(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  bool accepted = false;
  for (const addrinfo* info = found; info && !accepted; info = info->ai_next) {
    const int fd = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    pollfd entry{fd, POLLOUT, 0};
    int failure = 0;
    socklen_t length = sizeof failure;
    accepted = ::connect(fd, info->ai_addr, info->ai_addrlen) == 0 ||
               (errno == EINPROGRESS && poll(&entry, 1, 1'000) == 1 &&
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length) == 0 && failure == 0);
    close(fd);
  }
  freeaddrinfo(found);
  return accepted;
}

// Whether it is a socket that is bound to the port and serves nobody yet: a process that joins again has given it away, and one
// that others have started may have the name of something else.
bool still_bound(int fd, int port) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  int listening = 0;
  socklen_t size = sizeof listening;
  return fd >= 0 && getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
         address.sin_family == AF_INET && ntohs(address.sin_port) == port &&
         getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) == 0 && listening == 0;
}

enum class Part { server, client };

struct Attempt {
  c10::intrusive_ptr<c10d::Store> store;
  bool answered = false;
  std::string why_not{};
};

// Bounded: a stranger that listens on the port and says nothing would hold us for ever, and so would a lost answer: a client
// asks again, on another connection.
Attempt open_store(const Place& place, Part part, milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.port);
  options.isServer = part == Part::server;
  options.numWorkers = place.size;
  options.waitWorkers = false;
  options.timeout = limit;
  options.multiTenant = true;  // a process may join again
  if (part == Part::server && still_bound(place.bound, place.port)) {
    fcntl(place.bound, F_SETFD, FD_CLOEXEC);  // no program that this rank starts shall keep it open
    options.masterListenFd = place.bound;
  }
  const auto open = [host = place.host, options]() -> c10::intrusive_ptr<c10d::Store> {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  };
  const int tries = part == Part::client ? client_tries : 1;
  try {
    for (int i = 1; i <= tries; ++i) {
      auto store = bounded(limit / tries + milliseconds(i == tries ? 1'000 : 0), open);
      if (store) return {*store, true};
    }
    return {};
  } catch (const std::exception& e) {
    return {nullptr, true, first_line(e.what())};
  }
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int r : ranks) text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
  return text;
}

Error lost_store(int rank, const std::exception& why) {
  return Error(rank,
               "lost the store where the ranks meet before all had joined: rank 0 (or the launcher that serves it) "
               "ended first, and its own message tells why [" +
                   first_line(why.what()) + "]");
}

}  // namespace

bool await_key(c10d::Store& store, const std::string& key, int rank, Clock::time_point end) {
  const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
  if (left.count() > 0) {
    try {
      store.wait({key}, left);
      return true;
    } catch (const std::exception&) {  // not yet, or the store is gone
    }
  }
  try {  // once more, so that a store that is gone (with whoever serves it) is not taken for a rank that is missing
    return store.check({key});
  } catch (const std::exception& e) {
    throw lost_store(rank, e);
  }
}

Error not_heard_of(int rank, int size, milliseconds limit, const std::vector<int>& missing, const std::string& note) {
  return Error(rank, "waited " + seconds(limit) + " for all " + std::to_string(size) +
                         " ranks to join, and did not hear of " + list(missing) +
                         "; see whether they started, and reach the same MASTER_ADDR and MASTER_PORT" + note);
}

std::string late_objection(c10d::Store& store) {
  return store.check({objection_key}) ? store.get_to_str(objection_key) : "";
}

Rendezvous::Rendezvous(const Place& place, int world, milliseconds limit)
    : place_(place), limit_(limit), end_(Clock::now() + limit), serves_(place.rank == 0 && !place.store_is_hosted),
      store_(connect("plumb/" + place.attempt + "/" + std::to_string(world))) {}

Rendezvous::Rendezvous(const Place& place, c10::intrusive_ptr<c10d::Store> store, milliseconds limit)
    : place_(place), limit_(limit), end_(Clock::now() + limit), serves_(false), store_(std::move(store)) {}

c10::intrusive_ptr<c10d::Store> Rendezvous::connect(const std::string& prefix) {
  const auto ours = [&](const c10::intrusive_ptr<c10d::Store>& store) {
    return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  };
  const std::string at = place_.host + ":" + std::to_string(place_.port);
  const std::string unreachable =
      "cannot reach rank 0 at " + at + " within " + seconds(limit_) +
      "; see whether rank 0 runs (one that was told a world of 1 meets nobody), and set MASTER_ADDR and MASTER_PORT to "
      "its machine and port on every rank";
  const Attempt first = open_store(place_, serves_ ? Part::server : Part::client, limit_);
  if (first.store) return ours(first.store);
  if (!first.answered) {
    if (!listens(place_.host, place_.port)) throw Error(place_.rank, unreachable);
    throw Error(place_.rank, at + " answers, but not as plumb's rank 0 does; another program listens there: set "
                                  "MASTER_PORT to a free port on every rank");
  }
  const std::string& why = first.why_not;
  if (!serves_) throw Error(place_.rank, unreachable + " [" + why + "]");
  if (why.find("EADDRINUSE") == std::string::npos && why.find("in use") == std::string::npos) {
    throw Error(place_.rank, "cannot serve the rendezvous at " + at + " [" + why + "]");
  }
  // If that is another rank 0 of this world, everybody must hear of it.
  const Attempt second = open_store(place_, Part::client, std::min(limit_, recognition));
  try {
    if (second.store && await_key(*ours(second.store), claim_key(0), 0, Clock::now() + std::min(limit_, recognition))) {
      serves_ = false;
      return ours(second.store);
    }
  } catch (const Error&) {  // it ended meanwhile
  }
  throw Error(place_.rank, "cannot serve the rendezvous at " + at +
                               ": the port is in use; set MASTER_PORT to a free port on every rank [" + why + "]");
}

// Nobody can take part: tells every rank that has come, or will, and throws. `expected`: how many that may be.
void Rendezvous::object(const std::string& text, int expected) {
  const std::string said = store_->compareSet(verdict_key, std::string(), std::to_string(expected) + " " + text);
  if (said == settled) store_->compareSet(objection_key, std::string(), text);
  refuse(text, expected);
}

void Rendezvous::refuse(const std::string& text, int expected) {
  try {  // whoever serves the store stays until the others have read it
    const auto end = Clock::now() + linger;
    for (int64_t told = store_->add(told_key, 1); serves_ && told < expected && Clock::now() < end;
         told = store_->add(told_key, 0)) {
      std::this_thread::sleep_for(milliseconds(10));
    }
  } catch (const std::exception&) {  // and may have left before us
  }
  throw Error(place_.rank, text);
}

void Rendezvous::claim() {
  const Claim mine = Claim::of(place_);
  const auto take = [&] { return store_->compareSet(claim_key(place_.rank), std::string(), mine.encode()); };
  if (place_.rank != 0 && !await_key(*store_, claim_key(0), place_.rank, end_)) {
    throw not_heard_of(place_.rank, place_.size, limit_, {0});
  }
  const Claim zero = Claim::decode(place_.rank == 0 ? take() : store_->get_to_str(claim_key(0)));
  if (!mine.job.empty() && !zero.job.empty() && mine.job != zero.job) {
    store_->compareSet(stranger_key, std::string(), mine.name() + " of " + mine.job);
    throw Error(place_.rank, place_.host + ":" + std::to_string(place_.port) + " is where another job meets: " +
                                 zero.name() + " is of " + zero.job + ", and this one (" + mine.process() + ") of " +
                                 mine.job + "; give each job a MASTER_PORT of its own");
  }
  if (mine.size != zero.size) {
    object("ranks were told worlds of different sizes: " + zero.told + " on " + zero.name() + ", but " + mine.told +
               " on " + mine.name() +
               "; start every rank with the same size, and each job with a MASTER_PORT of its own",
           std::max(mine.size, zero.size));
  }
  const std::string standing = take();
  if (standing == mine.encode()) return;
  object("rank " + std::to_string(place_.rank) + " was claimed twice: by " + Claim::decode(standing).process() +
             " and by " + mine.process() +
             "; give each process a rank of its own, and each job a MASTER_PORT of its own",
         place_.size + 1);
}

// The store may go at any moment, with whoever serves it.
void Rendezvous::settle() {
  try {
    agree();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw lost_store(place_.rank, e);
  }
}

void Rendezvous::agree() {
  claim();
  if (store_->add("arrived", 1) == place_.size) store_->compareSet(verdict_key, std::string(), settled);
  if (!await_key(*store_, verdict_key, place_.rank, end_)) {
    std::vector<int> missing;
    for (int r = 0; r < place_.size; ++r) {
      if (!store_->check({claim_key(r)})) missing.push_back(r);
    }
    const bool strangers = store_->check({stranger_key});
    throw not_heard_of(place_.rank, place_.size, limit_, missing,
                       strangers ? "; one of another job came instead (" + store_->get_to_str(stranger_key) +
                                       "): give each job a MASTER_PORT of its own"
                                 : "");
  }
  const std::string verdict = store_->get_to_str(verdict_key);
  if (verdict == settled) return;
  const size_t space = verdict.find(' ');
  refuse(verdict.substr(space + 1), std::stoi(verdict));
}

}  // namespace plumb

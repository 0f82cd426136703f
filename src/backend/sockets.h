// Sockets: TCP connections from this rank to the others of a group, made when first needed, and the messages on them.
//
// Between two ranks there are several lanes, each a connection of its own. What is sent on a lane comes in the order of
// sending, into the places that the receiver named, in the order of naming. Nothing is read before it has a place: a rank
// that is ahead waits in the network, and costs nobody memory. Nothing here waits, has a thread or a lock; see TcpCalls.
#pragma once

#include <poll.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/names.h"

namespace plumb {

class Sockets {
 public:
  // Listens at `address`, and tells the others where by `store`. `names`: of the ranks in what it says of failures.
  Sockets(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& address, Names names = {});
  ~Sockets();
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  // Small host messages; gathers; what is sent when a collective begins; what is sent in the course of one. Messages of the
  // last two must be sent in the order of the collectives.
  enum class Lane : uint32_t { control, gather, issued, deferred };
  static constexpr int kLanes = 4;

  // One message, on one side of it. `label`: what it is; the receiver expects the same.
  struct Transfer {
    uint64_t label = 0;
    at::Tensor memory{};  // that holds `place`, until the transfer has ended
    char* place = nullptr;
    size_t bytes = 0;
    size_t moved = 0;  // with its head
    std::atomic<bool> ended{false};
    std::string failure{};      // why it ended without having come: "rank 1 …"
    bool contradicted = false;  // that is because the other side sent something else
  };
  using Ref = std::shared_ptr<Transfer>;
  struct Span {  // of a tensor's memory
    at::Tensor memory;
    char* place = nullptr;
    size_t bytes = 0;
  };
  Ref send(int peer, Lane lane, uint64_t label, const Span& from);
  Ref receive(int peer, Lane lane, uint64_t label, const Span& into);

  struct Head {
    uint64_t label = 0;
    uint64_t bytes = 0;
  };
  // Of a message that is not the one this rank expects next: why both fail, or nothing, and both wait.
  std::function<std::string(const Transfer& expected, const Head& came)> contradiction;

  const Names& names() const { return names_; }

  // Moves everything that can be moved now.
  void move();
  // Ends every transfer, and all later ones, with `why`.
  void close(const std::string& why);
  // What a sleeper should wait for; and whether it must look again soon all the same, since a peer is not there yet.
  std::vector<pollfd> wanted() const;
  bool looks_for_peers() const { return looking_ > 0; }
  // An epoll descriptor that rings when something other than control can be moved. A line rings once, until heard() is told
  // what it rang with.
  int alarm() const { return alarm_; }
  void heard(void* line);

 private:
  struct Line;
  struct Guest;  // somebody who connected, and has not said who he is
  Line& line(int peer, Lane lane);
  static Ref transfer(uint64_t label, const Span& span);
  void open(Line& line);
  void look_for(Line& line);
  void accept_guests();
  void let_nobody_in(int error);
  void step(Line& line);
  bool connected(Line& line);
  void write(Line& line);
  void read(Line& line);
  enum class Cause { lost, contradiction };
  void fail(Line& line, const std::string& why, Cause cause = Cause::lost);
  void arm(Line& line);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const Names names_;
  uint64_t secret_ = 0;  // whoever knows it has read it in the store
  int listener_ = -1;
  int alarm_ = -1;
  int looking_ = 0;    // lines whose peer has not said yet where it listens
  int expecting_ = 0;  // lines that the other side makes
  std::chrono::steady_clock::time_point next_look_{};
  std::vector<std::unique_ptr<Line>> lines_;  // by peer and lane; null until needed
  std::vector<Line*> busy_;                   // with something to move
  std::vector<Guest> guests_;
  std::string closed_;  // why, if it is
};

}  // namespace plumb

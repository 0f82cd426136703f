// A port for a rendezvous on this machine.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace plumb::testing {

// A free one, bound while this lives, so that no other test is given it. The rank that serves it inherits the socket: see
// PLUMB_STORE_FD and Process.
class Port {
 public:
  Port() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    const bool good = bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                      getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0;
    number_ = good ? ntohs(address.sin_port) : 0;
  }
  ~Port() { close(fd_); }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  std::string number() const { return std::to_string(number_); }
  int fd() const { return fd_; }

 private:
  int fd_;
  int number_ = 0;
};

// One that nobody listens at, and that was free a moment ago.
inline int free_port() { return std::stoi(Port().number()); }

}  // namespace plumb::testing

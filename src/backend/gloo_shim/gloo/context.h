// Stand-in for gloo's headers, which torch's wheels do not ship: just the names that c10d/ProcessGroupGloo.hpp mentions.
// No gloo object is built, read or destroyed by code compiled against this, so none of gloo's layouts is assumed.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

struct Context {
  void setTimeout(std::chrono::milliseconds);
};

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

namespace rendezvous {
struct Store {
  virtual ~Store();
  virtual void set(const std::string&, const std::vector<char>&) = 0;
  virtual std::vector<char> get(const std::string&) = 0;
  virtual void wait(const std::vector<std::string>&) = 0;
  virtual void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) = 0;
};
}  // namespace rendezvous

}  // namespace gloo

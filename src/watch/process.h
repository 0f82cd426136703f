// The process that made something. One that is forked later inherits it as it lies, without the threads that move it: what is let
// go of there is still its parent's, who goes on with the same memory and connections.
#pragma once

#include <unistd.h>

#include <tuple>
#include <utility>

namespace plumb {

class OwnProcess {
 public:
  bool left() const { return ::getpid() != process_; }

 private:
  const pid_t process_ = ::getpid();
};

// Never destroyed.
template <class... Things>
void leave_to_parent(Things&... things) {
  (void)new std::tuple<Things...>(std::move(things)...);
}

}  // namespace plumb

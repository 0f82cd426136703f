// Tells when a backward of the user's ends. A backward that runs inside another (re-entrant checkpointing, a backward
// in a hook) belongs to the outermost one: one pass, not two.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>

namespace torch::autograd {
struct SavedVariableHooks;
}

namespace plumb::backward {

class Listener {
 public:
  Listener();
  virtual ~Listener() = default;
  const uint64_t number;  // in the order in which they were made
  // The outermost backward is over: on the thread that called it, outside autograd, in the order of their numbers, which
  // is the same on every rank, however the graph went through their parameters. `failure` is what it threw, or
  // null. An exception thrown here reaches the user's backward() call; it is dropped when there is a failure already.
  virtual void backward_ended(std::exception_ptr failure) = 0;
};

// Inside an autograd hook: has `listener` called when the outermost backward around this hook ends. False if that was
// arranged already.
bool listen(const std::shared_ptr<Listener>& listener);

// When the outermost backward around this hook began; now, where none was announced.
std::chrono::steady_clock::time_point began();

// Announces a backward: lives on the thread that calls it, from before it begins until it has returned. Inside of another
// one it is nothing, since the outermost counts. Its record travels with libtorch's thread-local state into every thread
// that works on this backward, and into the backwards inside of it.
class Outermost {
 public:
  Outermost();
  ~Outermost();
  Outermost(const Outermost&) = delete;
  Outermost& operator=(const Outermost&) = delete;

  bool nested() const { return !state_; }

  // The backward has returned, or thrown `failure`: calls the listeners, if this was an outermost one. What it or the
  // first listener threw; null: nothing.
  [[nodiscard]] std::exception_ptr end(std::exception_ptr failure);

 private:
  struct State;
  std::unique_ptr<State> state_;  // null: inside of an announced one
};

// How tensors are saved for a backward: by hooks that `make` gives, over those that somebody else asked for (`inner`;
// null: nobody), or by those alone.
using Hooks = std::unique_ptr<torch::autograd::SavedVariableHooks>;
using MakeHooks = Hooks (*)(Hooks inner);
void save_with(MakeHooks make);
Hooks hooks_for_save(Hooks inner);

// From here to end_saving(), tensors that this thread saves go through hooks_for_save(). Nests.
void begin_saving();
void end_saving() noexcept;

// Whoever runs the backwards of this process and saves tensors for them. By itself an autograd engine of ours, which
// libtorch takes for its own; where Python runs them, that engine would take Python's hooks away, so Python is the host.
class Host {
 public:
  virtual ~Host() = default;
  // From now on every backward is announced by an Outermost. One that nobody announces, since C++ code below the host
  // began it, is found when its first gradient comes.
  virtual void install() = 0;
  virtual void begin_saving() = 0;
  virtual void end_saving() noexcept = 0;
};

// Before the first engine is built.
void use_host(Host& host);
// Makes the host announce backwards. Idempotent.
void install();

}  // namespace plumb::backward

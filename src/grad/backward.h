// Tells when a backward of the user's ends. A backward that runs inside another (re-entrant checkpointing, a backward
// in a hook) belongs to the outermost one: one pass, not two.
#pragma once

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

// Makes libtorch's default autograd engine one that announces its backwards. Idempotent.
void install();

// Inside an autograd hook: has `listener` called when the outermost backward around this hook ends. False if that was
// arranged already.
bool listen(const std::shared_ptr<Listener>& listener);

// How tensors are saved for a backward: by hooks that `make` gives, or plainly where it gives none.
using MakeHooks = std::unique_ptr<torch::autograd::SavedVariableHooks> (*)();
void save_with(MakeHooks make);

}  // namespace plumb::backward

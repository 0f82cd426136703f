// What nodes save inside a unit's scope, and how they get it back: unpacking gathers the unit.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <vector>

namespace plumb {

class Units;

namespace saved {

using Hooks = std::unique_ptr<torch::autograd::SavedVariableHooks>;

// From now on, tensors saved for a backward inside a scope remember their unit, and parameters saved by a backward that
// makes a graph of its own remember theirs.
void install();
void install(const std::weak_ptr<Units>& units);

// The units of the engine that has a parameter's memory; null: none.
std::shared_ptr<Units> owner_of(const c10::StorageImpl* storage);

// A use of a unit, or, with -1, of single parameters.
struct Scope {
  std::weak_ptr<Units> units;
  int unit = -1;
  std::vector<at::Tensor> parameters{};
};

// The scopes of this thread. Whether something was saved in the one that ends while hooks were set aside.
void push(Scope scope);
bool pop();
// Until the scopes that are open now end, something may be saved past the hooks: a transform runs, which forbids them.
void set_aside();
std::vector<Scope> scopes();

// Whoever saves instead: libtorch asks for one pair of hooks per tensor, and the innermost saver of the thread gives them,
// whatever scopes are inside or around it.
class Saver {
 public:
  virtual ~Saver() = default;
  virtual Hooks make() = 0;
};
void push(Saver& saver);

// How the scopes would save it, over hooks of somebody else's; never null.
Hooks make_plainly(Hooks inner = {});

// While it lives, this thread has no scopes and no savers but those that are pushed meanwhile.
class Fresh {
 public:
  Fresh();
  ~Fresh();
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;

 private:
  struct Stack;
  std::unique_ptr<Stack> before_;
};

}  // namespace saved
}  // namespace plumb

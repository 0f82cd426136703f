#include "unit/saved.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <vector>

#include "grad/backward.h"
#include "unit/units.h"

namespace plumb::saved {
namespace {

struct Entry {
  Scope scope;
  Saver* saver = nullptr;  // null: a scope
  bool aside = false;
};

thread_local std::vector<Entry> stack;

// The units of all engines, for what is saved outside of every scope: by a backward that makes a graph of its own.
struct Everybody {
  std::mutex mutex;
  std::vector<std::weak_ptr<Units>> units;

  std::shared_ptr<Units> home_of(const c10::StorageImpl* storage) {
    std::lock_guard lock(mutex);
    for (const auto& weak : units) {
      if (auto one = weak.lock(); one && one->is_home(storage)) return one;
    }
    return nullptr;
  }
};

Everybody& everybody() {
  static auto* instance = new Everybody;  // never destroyed: graphs may outlive main
  return *instance;
}

// A parameter is kept without its memory, as a tensor over the storage that follows it. Any other tensor is kept as it
// is; unpacking it tells that a node of the unit is about to run, which may use parameters that it did not save. Where
// somebody else's hooks are in force (checkpointing, offloading), they keep it instead.
class Gathering final : public torch::autograd::SavedVariableHooks {
 public:
  Gathering(const Scope& scope, Hooks inner) : units_(scope.units), unit_(scope.unit), inner_(std::move(inner)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = tensor._version();
    if (tensor.has_storage()) {
      const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
      if (const auto owner = everybody().home_of(storage)) {
        owner_ = owner;
        storage_ = storage;
      }
    }
    if (inner_) return inner_->call_pack_hook(tensor);  // it keeps the tensor, or makes it anew
    // Without its graph: an output that its own node holds would never die.
    data_ = tensor.grad_fn() || storage_ != nullptr ? tensor.detach() : tensor;
  }

  at::Tensor call_unpack_hook() override {
    if (const auto owner = owner_.lock()) owner->need_storage(storage_);
    if (const auto units = units_.lock(); units && unit_ >= 0) units->need(unit_);
    if (inner_) return inner_->call_unpack_hook();
    TORCH_CHECK(data_._version() == version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is "
                "at version ",
                data_._version(), "; expected version ", version_, " instead.");
    return data_;
  }

 private:
  std::weak_ptr<Units> units_;  // whose scope it was
  int unit_;
  std::weak_ptr<Units> owner_;                 // of the parameter, if it is one
  const c10::StorageImpl* storage_ = nullptr;  // alive while data_ is
  at::Tensor data_;
  uint32_t version_ = 0;
  Hooks inner_;
};

Hooks make_hooks(Hooks inner) {
  for (auto it = stack.rbegin(); it != stack.rend(); ++it) {
    if (it->saver != nullptr) return it->saver->make();
  }
  if (stack.empty() && torch::autograd::get_current_graph_task_id() < 0) return inner;
  return make_plainly(std::move(inner));
}

}  // namespace

Hooks make_plainly(Hooks inner) {
  for (auto it = stack.rbegin(); it != stack.rend(); ++it) {
    if (it->saver == nullptr) return std::make_unique<Gathering>(it->scope, std::move(inner));
  }
  return std::make_unique<Gathering>(Scope{}, std::move(inner));
}

void install() {
  backward::install();
  backward::save_with(&make_hooks);
}

void install(const std::weak_ptr<Units>& units) {
  std::lock_guard lock(everybody().mutex);
  std::erase_if(everybody().units, [](const auto& weak) { return weak.expired(); });
  everybody().units.push_back(units);
  install();
}

std::shared_ptr<Units> owner_of(const c10::StorageImpl* storage) { return everybody().home_of(storage); }

void push(Scope scope) {
  backward::begin_saving();
  stack.push_back({std::move(scope)});
}

void push(Saver& saver) {
  backward::begin_saving();
  stack.push_back({{}, &saver});
}

bool pop() {
  const bool aside = stack.back().aside;
  stack.pop_back();
  backward::end_saving();
  return aside;
}

void set_aside() {
  for (Entry& entry : stack) entry.aside = true;
}

std::vector<Scope> scopes() {
  std::vector<Scope> all;
  for (const Entry& entry : stack) {
    if (entry.saver == nullptr) all.push_back(entry.scope);
  }
  return all;
}

struct Fresh::Stack {
  std::vector<Entry> entries;
};

Fresh::Fresh() : before_(std::make_unique<Stack>()) { std::swap(stack, before_->entries); }
Fresh::~Fresh() { std::swap(stack, before_->entries); }

}  // namespace plumb::saved

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

struct Scope {
  std::shared_ptr<Units> units;
  int unit = -1;
};

thread_local std::vector<Scope> scopes;

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
// is; unpacking it tells that a node of the unit is about to run, which may use parameters that it did not save.
class Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(const Scope& scope) : units_(scope.units), unit_(scope.unit) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = tensor._version();
    if (tensor.has_storage()) {
      const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
      if (const auto owner = everybody().home_of(storage)) {
        owner_ = owner;
        storage_ = storage;
      }
    }
    // Without its graph: an output that its own node holds would never die.
    data_ = tensor.grad_fn() || storage_ != nullptr ? tensor.detach() : tensor;
  }

  at::Tensor call_unpack_hook() override {
    if (const auto owner = owner_.lock()) owner->need_storage(storage_);
    if (const auto units = units_.lock(); units && unit_ >= 0) units->need(unit_);
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
};

std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() {
  if (!scopes.empty()) return std::make_unique<Hooks>(scopes.back());
  if (torch::autograd::get_current_graph_task_id() >= 0) return std::make_unique<Hooks>(Scope{});
  return nullptr;
}

}  // namespace

void install(const std::weak_ptr<Units>& units) {
  std::lock_guard lock(everybody().mutex);
  std::erase_if(everybody().units, [](const auto& weak) { return weak.expired(); });
  everybody().units.push_back(units);
  backward::save_with(&make_hooks);
}

void push(std::shared_ptr<Units> units, int unit) { scopes.push_back({std::move(units), unit}); }
void pop() { scopes.pop_back(); }

}  // namespace plumb::saved

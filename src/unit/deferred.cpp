#include "unit/deferred.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <mutex>
#include <unordered_map>

#include "grad/manifest.h"
#include "plumb/error.h"
#include "plumb/unit.h"
#include "unit/door.h"
#include "unit/storage.h"

namespace plumb {
namespace deferred {
namespace {

struct Part {
  at::Tensor mine;     // this rank's elements, padded to the size of everybody's
  int64_t digest = 0;  // of all elements
  bool rows = false;   // they are this rank's rows, and nobody knows the others
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Weak parameter{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

struct Parts {
  std::mutex mutex;
  std::unordered_map<const void*, Part> all;  // by parameter
};

Parts& parts() {
  static auto* instance = new Parts;  // never destroyed: parameters may outlive main
  return *instance;
}

thread_local const World* building = nullptr;

// Takes its memory away until an engine gives it other.
void hollow(const at::Tensor& parameter, int rank) {
  at::Tensor nothing = at::empty({0}, parameter.options().requires_grad(false));
  c10::StorageImpl& storage = *nothing.storage().unsafeGetStorageImpl();
  nothing.unsafeGetTensorImpl()->set_sizes_and_strides(parameter.sizes(), parameter.strides());
  empty_storage(storage, "plumb: rank " + std::to_string(rank) +
                             ": a deferred parameter was used before an engine had it; build the plumb::Engine first");
  storage.set_nbytes(size_t{0});
  parameter.set_data(nothing);
}

void forget_dead() {
  std::erase_if(parts().all, [](const auto& entry) { return entry.second.parameter.expired(); });
}

void cut_one(const World& world, const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(parts().mutex);
  if (parts().all.contains(parameter.unsafeGetTensorImpl())) return;
  const at::Tensor flat = parameter.detach().contiguous().view(-1);
  const int64_t part = (flat.numel() + world.size() - 1) / world.size();
  const int64_t begin = std::min(part * world.rank(), flat.numel());
  const int64_t end = std::min(begin + part, flat.numel());
  at::Tensor mine = at::zeros({part}, flat.options());
  mine.narrow(0, 0, end - begin).copy_(flat.narrow(0, begin, end - begin));
  parts().all.emplace(parameter.unsafeGetTensorImpl(),
                      Part{std::move(mine), digest_of(flat), false, Part::Weak(parameter.getIntrusivePtr())});
  hollow(parameter, world.rank());
}

void cut_own(const World& world, const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) cut_one(world, parameter);
  for (const auto& child : module.children()) {
    if (!unit::find_door(child.get())) cut_own(world, *child);
  }
}

}  // namespace

void cut(const torch::nn::Module& module) {
  if (building == nullptr) return;
  {
    std::lock_guard lock(parts().mutex);
    forget_dead();
  }
  cut_own(*building, module);
}

void cut(const World& world, const std::vector<at::Tensor>& parameters) {
  {
    std::lock_guard lock(parts().mutex);
    forget_dead();
  }
  for (const at::Tensor& parameter : parameters) cut_one(world, parameter);
}

void keep_rows(const at::Tensor& parameter, const at::Tensor& mine, int rank) {
  at::NoGradGuard no_grad;
  std::lock_guard lock(parts().mutex);
  forget_dead();
  parts().all.insert_or_assign(parameter.unsafeGetTensorImpl(),
                               Part{mine.detach().reshape(-1), 0, true, Part::Weak(parameter.getIntrusivePtr())});
  hollow(parameter, rank);
}

at::Tensor take_rows(const at::Tensor& parameter) {
  std::lock_guard lock(parts().mutex);
  const auto it = parts().all.find(parameter.unsafeGetTensorImpl());
  if (it == parts().all.end() || !it->second.rows) return {};
  return parts().all.extract(it).mapped().mine;
}

bool waits(const at::Tensor& parameter) {
  std::lock_guard lock(parts().mutex);
  return parts().all.contains(parameter.unsafeGetTensorImpl());
}

at::Tensor restore(const std::string& name, const at::Tensor& parameter, const World& world, Group& group) {
  at::NoGradGuard no_grad;
  Part part;
  {
    std::lock_guard lock(parts().mutex);
    auto node = parts().all.extract(parameter.unsafeGetTensorImpl());
    part = std::move(node.mapped());
  }
  if (part.rows) throw Error(world.rank(), "parameter '" + name + "' was cut by rows, and its engine does not");
  const Where where{Where::Kind::setup, 0, 0, "the deferred parameter '" + name + "'"};
  for (const auto& other : exchange(world, std::span(&part.digest, 1), where)) {
    if (other[0] == part.digest) continue;
    throw Error(world.rank(), "the ranks built different values of the deferred parameter '" + name +
                                  "'; seed the generator alike on every rank before the model is built");
  }
  const at::Tensor all = group.allocate(part.mine.numel() * group.size(), part.mine.options());
  group.all_gather(all, part.mine).wait(where);
  return all.narrow(0, 0, parameter.numel()).view(parameter.sizes());
}

}  // namespace deferred

Deferred::Deferred(const World& world) : world_(world), before_(deferred::building) { deferred::building = &world_; }
Deferred::~Deferred() { deferred::building = before_; }

}  // namespace plumb

#include "engine/owners.h"

namespace plumb {

Owners& Owners::all() {
  static auto* instance = new Owners;  // never destroyed: engines may outlive main
  return *instance;
}

void Owners::claim(int rank, const NamedTensors& parameters, Engine::Impl* owner) {
  std::lock_guard lock(mutex_);
  for (const auto& [name, parameter] : parameters) {
    if (entries_.contains(parameter.unsafeGetTensorImpl())) {
      throw Error(rank,
                  "parameter '" + name + "' belongs to another engine already; give each parameter to one engine");
    }
  }
  for (const auto& [name, parameter] : parameters) entries_[parameter.unsafeGetTensorImpl()] = {owner, parameter};
}

void Owners::release(const Engine::Impl* owner) {
  std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](const auto& entry) { return entry.second.owner == owner; });
}

Engine::Impl* Owners::of_leaf(const at::Tensor& parameter) {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(parameter.unsafeGetTensorImpl());
  return it == entries_.end() ? nullptr : it->second.owner;
}

Engine::Impl* Owners::of(const at::Tensor& parameter, at::Tensor* own) {
  std::lock_guard lock(mutex_);
  if (const auto it = entries_.find(parameter.unsafeGetTensorImpl()); it != entries_.end()) {
    *own = it->second.parameter;
    return it->second.owner;
  }
  for (const auto& [impl, entry] : entries_) {
    if (entry.parameter.is_alias_of(parameter) && entry.parameter.storage_offset() == parameter.storage_offset() &&
        entry.parameter.sizes() == parameter.sizes()) {
      *own = entry.parameter;
      return entry.owner;
    }
  }
  return nullptr;
}

}  // namespace plumb

// Whose parameter is it? One parameter in two engines would be reduced and updated twice.
#pragma once

#include <mutex>
#include <unordered_map>

#include "plumb/engine.h"

namespace plumb {

class Owners {
 public:
  // An Error if one of them belongs to an engine already.
  void claim(int rank, const NamedTensors& parameters, Engine::Impl* owner);
  void release(const Engine::Impl* owner);
  // The engine that has this parameter, or one that shares its memory as a compiled graph's inputs do; null: none.
  Engine::Impl* of(const at::Tensor& parameter, at::Tensor* own);

  // The engine that has exactly this leaf; null: none.
  Engine::Impl* of_leaf(const at::Tensor& parameter);

  static Owners& all();

 private:
  struct Entry {
    Engine::Impl* owner = nullptr;
    at::Tensor parameter;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Entry> entries_;
};

}  // namespace plumb

// The engine's insides, for the engine itself and for tests that inject faults.
#pragma once

#include <memory>

#include "grad/reducer.h"
#include "optim/update.h"
#include "plumb/engine.h"

namespace plumb {

struct Engine::Impl {
  World world;
  Options options;
  NamedTensors parameters;
  NamedTensors buffers;
  Updater updater;
  std::shared_ptr<Reducer> reducer;

  Impl(World world, NamedTensors parameters, NamedTensors buffers, Optimizer optimizer, Options options);
  ~Impl();

  // Rank 0's values, everywhere.
  void broadcast(const NamedTensors& tensors, const Where& where);
};

}  // namespace plumb

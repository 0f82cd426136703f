// The engine's insides, for the engine itself and for tests that inject faults.
#pragma once

#include <memory>

#include "grad/reducer.h"
#include "optim/update.h"
#include "plumb/engine.h"
#include "unit/units.h"

namespace plumb {

struct Engine::Impl {
  World world;
  Options options;
  NamedTensors parameters;
  NamedTensors buffers;
  Updater updater;
  std::shared_ptr<Reducer> reducer;

  double loss_scale = 1.0;
  int64_t good_steps = 0;        // since the scale last changed
  std::shared_ptr<Units> units;  // null: all parameters are whole

  Impl(World world, NamedTensors parameters, NamedTensors buffers, std::vector<UnitSpec> specs, Optimizer optimizer,
       Options options);
  ~Impl();

  // Rank 0's values, everywhere.
  void broadcast(const NamedTensors& tensors, const Where& where);
  void settle_scale(bool skipped);
  void publish(const std::vector<at::Tensor>& changed);
};

}  // namespace plumb

// The engine's insides, for the engine itself and for tests that inject faults.
#pragma once

#include <memory>
#include <optional>

#include "grad/reducer.h"
#include "optim/norm.h"
#include "optim/scaler.h"
#include "optim/update.h"
#include "plumb/engine.h"
#include "unit/units.h"

namespace plumb {

class Saving;

struct Engine::Impl {
  World world;
  Options options;
  NamedTensors parameters;
  NamedTensors buffers;
  Scaler scaler;
  std::optional<Updater> updater;  // from the check of the options on
  std::shared_ptr<Reducer> reducer;

  std::shared_ptr<Units> units;  // null: all parameters are whole

  std::shared_ptr<Saving> saving;  // from the first save on

  Impl(World world, NamedTensors parameters, NamedTensors buffers, std::vector<UnitSpec> specs, Optimizer optimizer,
       Options options);
  ~Impl();

  // Around the update: everything of a step before it, and after it. A skipped step is over with the first.
  StepInfo begin_step();
  void end_step();
  bool in_step = false;    // between the two
  bool skipped = false;    // the step that began last
  bool scales = false;     // the user has had a loss scaled, by scale() or backward(), or asked for the scale
  Settings user_settings;  // of the user's own optimizer, compared at a step as ours are

  // Rank 0's values, everywhere.
  void broadcast(const NamedTensors& tensors, const Where& where);
  // Some steps cannot be captured into a graph of a device.
  void check_capture() const;
  [[noreturn]] void refuse_nonfinite();
  NormOrder norm_order() const {
    if (!options.deterministic) return NormOrder::any;
    return options.cut == Cut::at_rows ? NormOrder::exact_anywhere : NormOrder::exact;
  }
  void publish(const std::vector<at::Tensor>& changed);
};

}  // namespace plumb

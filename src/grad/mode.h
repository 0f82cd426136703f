// Leaves InferenceMode for a scope: whatever the engine makes, or is made in a backward, takes part in training later.
#pragma once

#include <c10/core/InferenceMode.h>

#include <optional>

namespace plumb {

class TrainingMode {
 public:
  TrainingMode() {
    if (c10::InferenceMode::is_enabled()) off_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

}  // namespace plumb

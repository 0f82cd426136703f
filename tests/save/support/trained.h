// An engine with something to save: odd shapes, a unit, a buffer, a parameter that was never trained.
#pragma once

#include <gtest/gtest.h>
#include "libtorch.h"

#include <map>
#include <mutex>
#include <string>

#include "engine/impl.h"
#include "engine/slots.h"
#include "engine/support/plain.h"

namespace plumb::test {

struct Model : Parts {
  explicit Model(uint64_t seed, at::ScalarType dtype = at::kFloat) : Parts(seed, dtype) {
    running = register_buffer("running", at::arange(5, at::kFloat) * static_cast<double>(seed));
    counted = register_buffer("counted", at::tensor(static_cast<int64_t>(seed)));
  }
  at::Tensor running, counted;
};

// Gradients that every sum of up to four ranks has exactly, for all parameters but one.
inline void train(Engine& engine, Model& model, int64_t steps, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parameters = model.parameters();
  for (int64_t i = 0; i < steps; ++i) {
    std::vector<at::Tensor> gradients;
    for (size_t p = 0; p < parameters.size(); ++p) {
      const auto seed = static_cast<uint64_t>(engine.steps() * 100 + static_cast<int64_t>(p));
      gradients.push_back(p == 1 ? at::Tensor() : (noise(parameters[p].sizes(), seed) * 4).round() * 0.25);
    }
    engine.backward(model.loss(gradients).to(dtype == at::kHalf ? at::kFloat : dtype));
    model.running.add_(1.5);
    engine.step();
    engine.zero_grad();
  }
}

// Everything that a checkpoint holds of an engine, whole, by title. The ranks are threads: each adds its part.
class Everything {
 public:
  void add(Engine& engine) {
    at::NoGradGuard no_grad;
    const auto updates = updates_of(engine.impl());
    for (const SavedSlot& slot : slots_of(engine.impl(), updates)) {
      std::lock_guard lock(mutex_);
      at::Tensor& whole = all_[save::to_string(slot.kind) + " " + slot.name + " " + slot.key];
      if (!whole.defined()) whole = at::zeros({slot.owner.numel()}, slot.dtype());
      if (slot.end > slot.begin) whole.narrow(0, slot.begin, slot.end - slot.begin).copy_(slot.memory);
    }
    std::lock_guard lock(mutex_);
    for (const auto& [name, count] : updates) all_["updates " + name] = at::tensor(count);
    all_["step"] = at::tensor(engine.steps());
    all_["lr"] = at::tensor(engine.lr(), at::kDouble);
    all_["scale"] = at::tensor(engine.impl().scaler.scale(), at::kDouble);
    all_["patience"] = at::tensor(engine.impl().scaler.patience());
    all_["good steps"] = at::tensor(engine.impl().scaler.good_steps());
  }
  // The first difference in bits; empty: none.
  std::string difference(const Everything& other) const {
    for (const auto& [name, value] : all_) {
      const auto found = other.all_.find(name);
      if (found == other.all_.end()) return name + " is missing";
      if (value.scalar_type() != found->second.scalar_type() || value.sizes() != found->second.sizes()) {
        return name + " has another dtype or shape";
      }
      if (value.numel() > 0 &&
          std::memcmp(value.const_data_ptr(), found->second.const_data_ptr(), value.nbytes()) != 0) {
        return c10::str(name, " differs: ", value.flatten(), " and ", found->second.flatten());
      }
    }
    return all_.size() == other.all_.size() ? "" : "there is more";
  }
  const std::map<std::string, at::Tensor>& all() const { return all_; }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> all_;
};

}  // namespace plumb::test

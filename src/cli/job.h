// What a run trains: its model, its engine's options, and the micro-batches of a step.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/settings.h"
#include "model/task.h"
#include "plumb/engine.h"
#include "watch/timeline.h"

namespace plumb::cli {

at::Device device_of(const Settings& settings, const World& world);
model::Gpt build_model(const Settings& settings, int64_t vocabulary, const at::Device& device);
AdamW optimizer_of(const Settings& settings);
Options engine_options(const Settings& settings);

// The part of one rank in the steps of a run.
class Job {
 public:
  Job(const Settings& settings, const model::Task& task, Engine& engine, model::Gpt model);

  int64_t micros() const { return micros_; }  // backwards per step and rank
  // Micro-batch `micro` of `rank`, in the step that begins after `samples` samples.
  model::Batch batch(int64_t samples, int rank, int64_t micro) const;
  // All of this rank.
  std::vector<model::Batch> batches(int64_t samples) const;

  // Its share of the rank's loss in a step, scaled where losses are: what a backward begins at.
  at::Tensor share_of(const at::Tensor& loss) const;
  at::Tensor loss(const model::Batch& batch) { return model::loss_of(model_, batch); }
  // Forward and backward of micro-batch `micro`, of which the last is reduced; its loss.
  double run(const model::Batch& batch, int64_t micro);
  at::Tensor backward(const model::Batch& batch, int64_t micro);  // the same, and the host does not wait for the loss

 private:
  const model::Task& task_;
  Engine& engine_;
  model::Gpt model_;
  at::Device device_;
  int64_t batch_, micros_, micro_;  // samples of a step; backwards per rank; samples of one
};

}  // namespace plumb::cli

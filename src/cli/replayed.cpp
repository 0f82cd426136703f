#include "cli/replayed.h"

namespace plumb::cli {
namespace {

constexpr int64_t kWarm = 3;

}  // namespace

Replayed::Replayed(Engine& engine, Job& job, const at::Device& device) : engine_(engine), job_(job), graph_(device) {}

std::vector<at::Tensor> Replayed::run_now(const std::vector<model::Batch>& batches) {
  std::vector<at::Tensor> losses;
  for (size_t i = 0; i < batches.size(); ++i) losses.push_back(job_.backward(batches[i], static_cast<int64_t>(i)));
  return losses;
}

std::vector<double> Replayed::run(const std::vector<model::Batch>& batches) {
  const bool records = steps_++ == kWarm;
  if (!graph_.recorded()) engine_.zero_grad();
  if (records) {
    for (const model::Batch& batch : batches) inputs_.push_back({batch.input.clone(), batch.target.clone()});
    graph_.record([&] { losses_ = run_now(inputs_); });
  }
  if (graph_.recorded()) {
    for (size_t i = 0; i < batches.size(); ++i) {
      inputs_[i].input.copy_(batches[i].input);
      inputs_[i].target.copy_(batches[i].target);
    }
    graph_.replay();
  } else {
    losses_ = run_now(batches);
  }
  std::vector<double> losses;
  for (const at::Tensor& loss : losses_) losses.push_back(loss.item<double>());
  return losses;
}

}  // namespace plumb::cli

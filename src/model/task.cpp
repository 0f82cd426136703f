// What the tasks share.
#include "model/task.h"

#include <torch/torch.h>

namespace plumb::model {

at::Tensor loss_of(Gpt& model, const Batch& batch) {
  const int64_t counted = batch.target.size(1);
  const auto logits = model->forward(batch.input).narrow(1, batch.input.size(1) - counted, counted);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(at::kFloat), batch.target.flatten());
}

at::Tensor decode(Gpt& model, at::Tensor prompt, int64_t count) {
  torch::NoGradGuard no_grad;
  const int64_t asked = prompt.size(1);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = std::min(prompt.size(1), model->size().context);
    const auto seen = prompt.narrow(1, prompt.size(1) - length, length);
    const auto next = model->forward(seen).select(1, length - 1).argmax(-1, /*keepdim=*/true);
    prompt = at::cat({prompt, next}, 1);
  }
  return prompt.narrow(1, asked, count);
}

// splitmix64's finalizer over each number in turn.
uint64_t mix(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t state = 0;
  for (const uint64_t word : {seed, a, b, c}) {
    state += word + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
  return state;
}

}  // namespace plumb::model

// What the simulator's tests share: streams by one letter, models, bitwise comparison.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plumb/sim.h"

namespace plumb::sim {

inline at::TensorOptions on(int device_index) { return at::device(device(device_index)).dtype(at::kFloat); }

// The CPU's values of both, compared as bytes.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

// Runs `body` with `stream` as the current stream.
template <class Body>
auto with(c10::Stream stream, const Body& body) {
  const c10::StreamGuard guard(stream);
  return body();
}

inline c10::Event event_on(c10::Stream stream) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(stream);
  return event;
}

// A race whose first and second operation contain these words, in either order.
testing::AssertionResult reports(const std::vector<Race>& races, const std::string& one, const std::string& other);

// Seeds that cover every temper of the scheduler.
inline constexpr uint64_t few_seeds = 12;

using Gradients = std::vector<at::Tensor>;

struct ModelCase {
  std::string name;
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)> forward;
  std::function<at::Tensor()> input;
};
const std::vector<ModelCase>& models();

// Trains for some steps; the losses and the parameters, on the CPU.
std::vector<at::Tensor> train(const ModelCase& model, const at::Device& device, int steps,
                              const std::string& optimizer);

}  // namespace plumb::sim

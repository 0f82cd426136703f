// Actor: one rank of a scenario. The same program runs on the simulated device, where its lanes are streams, and on the
// CPU, where there is one lane and nothing to order.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "nn/ops.h"
#include "plumb/engine.h"
#include "plumb/sim.h"
#include "plumb/unit.h"
#include "plumb/world.h"
#include "sim/scenarios.h"

namespace plumb::sim {

struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::linear(x, weight, bias)); }
  // By a node that writes the weight's gradient itself, at once or when the store is flushed.
  at::Tensor fused(const at::Tensor& x, const std::shared_ptr<nn::WgradStore>& store = nullptr) {
    return at::tanh(nn::linear(x, weight, bias, store));
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Layer);

// Two branches over one trunk, and a weight larger than a bucket.
struct Net : torch::nn::Module {
  Net();
  Unit<Layer> trunk{nullptr}, left{nullptr}, right{nullptr}, large{nullptr}, head{nullptr};
};

class Actor {
 public:
  Actor(const Scenario& scenario, const World& world, const std::string& strategy, c10::Device device);

  int rank() const { return world_.rank(); }
  bool simulated() const { return !device_.is_cpu(); }

  // Makes the engine. Lane l of `accumulators` is where gradients of parameter i, i % lanes == l, are accumulated; none:
  // where this is called.
  Engine& build(const std::vector<int>& accumulators = {});
  Engine& engine() { return *engine_; }
  // Times the hosts waited for a device since all of them had their engines.
  uint64_t device_waits() const { return statistics().device_waits - waits_; }
  // Reports call the gradients' memory by its parameters, wherever it lies by now.
  void name_gradients();
  Net& net() { return *net_; }

  at::TensorOptions options() const { return at::device(device_).dtype(scenario_.half ? at::kBFloat16 : at::kFloat); }
  // This rank's samples of a micro-batch, copied to the device under the current lane.
  at::Tensor input(int micro) const;
  at::Tensor loss(const at::Tensor& x);
  // The same with the branches under two lanes of their own, which the program orders as any user must.
  at::Tensor branched_loss(const at::Tensor& x, int left, int right);
  // What a backward of its own would hand over for a parameter, made under the current lane.
  at::Tensor raw_gradient(const at::Tensor& parameter, int number) const;

  // Lane 0 is the one the program begins on.
  template <class Body>
  auto on(int lane, const Body& body) {
    if (!simulated()) return body();
    const c10::StreamGuard guard(stream(lane));
    return body();
  }
  void wait(int waiter, int on);
  // What was made under one lane is used under the current one.
  void uses(const at::Tensor& tensor) const;

  // A number the results are compared by; it is read when the program has ended.
  void note(const at::Tensor& value) { noted_.push_back(value.detach()); }
  // Everything noted and all parameters, on the CPU, exactly, as f32.
  at::Tensor results();

 private:
  c10::Stream stream(int lane);

  const Scenario& scenario_;
  World world_;
  std::string strategy_;
  c10::Device device_;
  std::shared_ptr<Net> net_;
  std::unique_ptr<Engine> engine_;
  std::vector<c10::Stream> streams_;
  std::vector<at::Tensor> noted_;
  uint64_t waits_ = 0;  // while the engines were made
};

}  // namespace plumb::sim

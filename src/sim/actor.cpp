#include "sim/actor.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "engine/impl.h"

namespace plumb::sim {
namespace {

constexpr int64_t kWidth = 8;
constexpr int64_t kWide = 48;

// Values that depend on nothing but the name: every rank and every run has the same.
at::Tensor values(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed)) * 0.3;
}

}  // namespace

LayerImpl::LayerImpl(int64_t in, int64_t out) {
  weight = register_parameter("weight", values({out, in}, 1000 + in * 64 + out));
  bias = register_parameter("bias", values({out}, 2000 + in * 64 + out));
}

Net::Net() {
  trunk = register_module("trunk", Layer(kWidth, kWidth));
  left = register_module("left", Layer(kWidth, kWidth + 1));
  right = register_module("right", Layer(kWidth, kWidth + 1));
  large = register_module("large", Layer(kWidth + 1, kWide));
  head = register_module("head", Layer(kWide, 3));
}

Actor::Actor(const Scenario& scenario, const World& world, const std::string& strategy, c10::Device device)
    : scenario_(scenario), world_(world), strategy_(strategy), device_(device) {
  // The accumulators are made elsewhere on purpose.
  if constexpr (requires { at::globalContext().setWarnOnAccumulateGradStreamMismatch(false); }) {
    at::globalContext().setWarnOnAccumulateGradStreamMismatch(false);
  }
  if (!simulated()) return;
  streams_.push_back(current_stream(device.index()));
  for (const char* name : {"one", "two", "three"}) streams_.push_back(new_stream(device.index(), name));
}

Engine& Actor::build(const std::vector<int>& accumulators) {
  net_ = std::make_shared<Net>();
  if (scenario_.half) {
    net_->to(device_, at::kBFloat16);
  } else {
    net_->to(device_);
  }
  for (const auto& item : net_->named_parameters()) {
    if (simulated()) sim::name(item.value(), item.key());
  }
  // Autograd accumulates a leaf's gradient where its accumulator was made; a graph that lives keeps it.
  std::vector<at::Tensor> graphs;
  size_t next = 0;
  for (const at::Tensor& parameter : net_->parameters()) {
    if (accumulators.empty()) break;
    const int lane = accumulators[next++ % accumulators.size()];
    wait(lane, 0);
    on(lane, [&] { graphs.push_back(parameter.view_as(parameter)); });
  }
  Options options = scenario_.options;
  options.strategy = strategy_;
  engine_ = std::make_unique<Engine>(world_, *net_, scenario_.optimizer, options);
  name_gradients();
  world_.barrier();
  if (simulated()) waits_ = statistics().device_waits;
  world_.barrier();
  return *engine_;
}

void Actor::name_gradients() {
  if (!simulated()) return;
  for (const Sink& sink : engine_->impl().reducer->sinks()) {
    if (sink.view.defined()) sim::name(sink.view, "gradient of " + sink.name);
  }
}

at::Tensor Actor::input(int micro) const {
  const auto seed = static_cast<uint64_t>(int64_t{7919} * micro + int64_t{104729} * (rank() + 1));
  const at::Tensor x = at::randn({4, kWidth}, at::detail::createCPUGenerator(seed));
  return x.to(options().dtype()).to(device_);
}

at::Tensor Actor::raw_gradient(const at::Tensor& parameter, int number) const {
  return values(parameter.sizes(), 5000 + 61 * number + rank()).to(options().dtype()).to(device_);
}

at::Tensor Actor::loss(const at::Tensor& x) {
  const at::Tensor h = net_->trunk->forward(x);
  const at::Tensor both = net_->left->forward(h) + net_->right->forward(h);
  return net_->head->forward(net_->large->forward(both)).square().mean();
}

at::Tensor Actor::branched_loss(const at::Tensor& x, int left, int right) {
  const at::Tensor h = net_->trunk->forward(x);
  wait(left, 0);
  wait(right, 0);
  const at::Tensor a = on(left, [&] { return net_->left->forward(h); });
  const at::Tensor b = on(right, [&] { return net_->right->forward(h); });
  on(left, [&] { uses(h); });
  on(right, [&] { uses(h); });
  wait(0, left);
  wait(0, right);
  const at::Tensor both = a + b;
  uses(a);
  uses(b);
  return net_->head->forward(net_->large->forward(both)).square().mean();
}

void Actor::wait(int waiter, int on) {
  if (simulated()) wait_for(stream(waiter), stream(on));
}

void Actor::uses(const at::Tensor& tensor) const {
  if (simulated()) const_cast<at::Tensor&>(tensor).record_stream(current_stream(device_.index()));
}

c10::Stream Actor::stream(int lane) { return streams_.at(static_cast<size_t>(lane)); }

at::Tensor Actor::results() {
  for (int lane = 1; lane <= 3; ++lane) wait(0, lane);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = net_->parameters();
  const Gathered whole = engine_->gathered(parameters);
  std::vector<at::Tensor> flat = noted_;
  flat.insert(flat.end(), parameters.begin(), parameters.end());
  for (at::Tensor& each : flat) each = each.reshape(-1).to(at::kFloat);
  return at::cat(flat).cpu();
}

}  // namespace plumb::sim

// The model that the tests of units train: blocks, a unit inside a unit, tied weights.
#pragma once

#include "libtorch.h"

#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "engine/impl.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"

namespace plumb::test {

using scenarios::checkpoint;
using scenarios::Checkpoint;

// Unpacks what it saved, and throws once.
struct Explosive : torch::autograd::Function<Explosive> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t armed) {
    context->save_for_backward({x});
    context->saved_data["armed"] = armed;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    context->get_saved_variables();
    bool& armed = *reinterpret_cast<bool*>(context->saved_data["armed"].toInt());
    if (std::exchange(armed, false)) throw std::runtime_error("planned");
    return {gradients[0] * 2, at::Tensor()};
  }
};

// A block that may stash a weight raw, return an auxiliary output, or recompute itself.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x))); }
  at::Tensor explosive(const at::Tensor& x, bool& armed) {
    return down(Explosive::apply(up(x), reinterpret_cast<int64_t>(&armed)));
  }
  at::Tensor recomputed(const at::Tensor& x) {
    body = [this](const at::Tensor& h) { return forward(h); };
    return checkpoint(body, x);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  Checkpoint::Body body;
};
TORCH_MODULE(Block);

// A unit with a unit inside.
struct AroundImpl : torch::nn::Module {
  explicit AroundImpl(int64_t width) {
    inner = register_module("inner", Block(width));
    scale = register_parameter("scale", torch::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x * scale) * scale; }
  Unit<Block> inner{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Around);

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(3);
    first = register_module("first", Block(6));
    second = register_module("second", Block(6));
    outer = register_module("outer", Around(6));
    table = register_module("table", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    tied = register_module("tied", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    tied->weight = tied->register_parameter("same", table->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first->forward(x);
    h = second(h);
    h = outer->forward(h);
    return torch::linear(table->forward(h), tied->weight);
  }
  Unit<Block> first{nullptr}, second{nullptr};
  Unit<Around> outer{nullptr};
  Unit<torch::nn::Linear> table{nullptr}, tied{nullptr};
};

// Bytes of parameters that are whole on this rank right now.
inline int64_t gathered(const Engine& engine) {
  return engine.impl().units ? engine.impl().units->gathered_bytes() : 0;
}

// `body` on each of two ranks, with an engine over a net of its own.
inline void on_two(const std::function<void(World, Net&, Engine&)>& body, const std::string& strategy = "zero3") {
  run_local(2, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
    body(world, net, engine);
  });
}

}  // namespace plumb::test

// A chain of units, and ranks that gather them in place or together.
#pragma once

#include <functional>
#include <mutex>

#include "unit/support/net.h"
#include "world/world_impl.h"

namespace plumb::test {

using scenarios::Alike;

// Five layers of one size, each a unit; odd sizes, so that cuts fall inside parameters.
struct Chain : Alike {
  Chain() : Alike(5) {}
  at::Tensor forward(at::Tensor h, const std::function<void(const at::Tensor&)>& between = {}) {
    for (auto& layer : layers) {
      h = torch::tanh(layer->forward(h));
      if (between) between(h);
    }
    return h;
  }
};

// `asking`: together, over a backend that cannot say what it gathers.
enum class Gather { in_place, together, asking };
constexpr int64_t kNextAlone = 1;  // bytes of a window that holds no more than it must

inline void on_ranks(int ranks, Gather how, const std::function<void(World, Chain&, Engine&)>& body,
                     int64_t window = kNextAlone) {
  run_local(ranks, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    Chain net;
    lock.unlock();
    if (how == Gather::asking) world.impl().control->has_links = false;
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    if (how != Gather::in_place) engine.impl().units->gather_together(window);
    body(world, net, engine);
  });
}

inline const at::Tensor ones = torch::ones({2, 6});

}  // namespace plumb::test

#include "scenarios/support/walks.h"

#include <deque>
#include <random>

#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

constexpr int kLayers = 8;

// A walk of each rank's own through the layers. A checkpointed one brings its gradients while its backward is under way, and
// again when it is used again, to a bucket that may be on its way by then.
at::Tensor walk(Alike& net, at::Tensor h, std::mt19937_64& random, std::deque<Checkpoint::Body>& bodies) {
  const int length = 1 + static_cast<int>(random() % 12);
  for (int i = 0; i < length; ++i) {
    auto& layer = net.layers[random() % kLayers];
    if (random() % 2 == 0) {
      bodies.emplace_back([&layer](const at::Tensor& x) { return torch::tanh(layer->forward(x)); });
      h = checkpoint(bodies.back(), h);
    } else {
      h = torch::tanh(layer->forward(h));
    }
  }
  return h;
}

}  // namespace

Scenario walks(uint64_t seed) {
  Scenario scenario{"P", "walks", [] { return std::make_shared<Alike>(kLayers); },
                    [seed](Stage& stage) {
                      auto& net = stage.as<Alike>();
                      std::mt19937_64 alike(seed), own(seed * 31 + static_cast<uint64_t>(stage.rank) + 1);
                      for (int step = 0; step < 3; ++step) {
                        const auto passes = 1 + alike() % 2;
                        for (uint64_t pass = 0; pass < passes; ++pass) {
                          const bool held = alike() % 4 == 0, together = alike() % 4 == 0;
                          auto quiet = held ? stage.no_sync() : nullptr;
                          std::deque<Checkpoint::Body> bodies;
                          std::mt19937_64 same(alike());
                          const at::Tensor x = stage.input({2, 6}, static_cast<int>(2 * step + pass)).requires_grad_();
                          stage.share(walk(net, x, together ? same : own, bodies).pow(2).sum()).backward();
                        }
                        stage.step();
                        if (alike() % 3 > 0) stage.zero_grad();
                      }
                    }};
  scenario.optimizer = SGD{.lr = 0.05};
  scenario.options.hold_unsharded = seed % 2 == 0;
  scenario.tolerance = 2e-4;
  return scenario;
}

}  // namespace plumb::scenarios

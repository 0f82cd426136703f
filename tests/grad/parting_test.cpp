// Ranks that use different units, where nothing but asking keeps their gathers apart and every wait blocks the host: nobody waits
// for a rank that waits for him, and every gradient counts, however late it comes.
#include <gtest/gtest.h>

#include <mutex>

#include "engine/impl.h"
#include "scenarios/support/models.h"
#include "scenarios/support/walks.h"
#include "slowness.h"
#include "world/world_impl.h"

namespace plumb::scenarios {
namespace {

class Parting : public testing::TestWithParam<std::pair<const char*, int>> {};

TEST_P(Parting, OfRanksThatAskIsRightWhateverTheyUse) {
  const auto& [strategy, ranks] = GetParam();
  for (uint64_t seed = 0; seed < 24 / slowness; ++seed) {
    const Scenario scenario = walks(seed);
    const Outcome expected = play_reference(scenario, ranks);
    ASSERT_EQ(
        difference(expected, play_engine(scenario, ranks, strategy, static_cast<int>(seed) % ranks, Medium::asking),
                   scenario.tolerance),
        "")
        << "seed " << seed;
  }
}

constexpr int64_t kTwo = 2 * kAlignment * sizeof(float);  // a bucket of two weights, and no more

// Layers that are units, and weights that are none: nobody asks before their gradients. The last two lie in one bucket, which is not
// the last one.
struct Weighed : Alike {
  Weighed() : Alike(2) {
    for (const char* name : {"first", "second", "third"})
      weights.push_back(register_parameter(name, torch::randn({6})));
  }
  std::vector<at::Tensor> weights;
};

// Some ranks use them several times, in checkpoints: their bucket is on its way when the next gradient comes. The others need the
// shards of those before they bring theirs, in a hook.
Scenario late(bool fails) {
  Scenario scenario{"P", "late", [] { return std::make_shared<Weighed>(); },
                    [fails](Stage& stage) {
                      auto& net = stage.as<Weighed>();
                      for (int pass = 0; pass < 4; ++pass) {
                        const bool throws = fails && pass == 1;
                        const Checkpoint::Body body = [&net](const at::Tensor& x) {
                          return torch::tanh(x * net.weights[1] + net.weights[2]);
                        };
                        at::Tensor h = stage.input({2, 6}, pass).requires_grad_();
                        if ((stage.rank + pass) % 2 == 0) {
                          for (int i = 0; i < 3; ++i) h = checkpoint(body, h);
                        } else {
                          h = body(h);
                          h.register_hook([&](const at::Tensor& gradient) {
                            const at::AutoGradMode on(true);
                            const at::Tensor y = net.layers[pass % 2]->forward(stage.input({2, 6}, 10 + pass));
                            stage.share(y.pow(2).sum()).backward();
                            if (throws) throw std::runtime_error("planned");
                            return gradient;
                          });
                        }
                        for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
                        try {
                          stage.share(h.pow(2).sum()).backward();
                        } catch (const std::runtime_error&) {
                          if (!throws) throw;
                        }
                        if (throws) stage.zero_grad();
                        if (pass != 2) stage.step();
                        if (pass == 1) stage.all([&] { net.weights[2].mutable_grad().reset(); });
                      }
                    }};
  scenario.optimizer = SGD{.lr = 0.05};
  scenario.options.bucket_bytes = scenario.options.first_bucket_bytes = kTwo;
  return scenario;
}

TEST_P(Parting, OfRanksThatAskHoldsUpNoLateGradient) {
  const auto& [strategy, ranks] = GetParam();
  for (const bool fails : {false, true}) {
    const Scenario scenario = late(fails);
    const Outcome expected = play_reference(scenario, ranks);
    for (int of = 0; of < ranks; ++of) {
      ASSERT_EQ(difference(expected, play_engine(scenario, ranks, strategy, of, Medium::asking), scenario.tolerance),
                "")
          << "rank " << of << (fails ? ", after a backward that failed" : "");
    }
  }
}

// What comes while a reduction is on its way waits beside it, also where that reduction brings the first gradient of its parameter to
// a bucket that holds others: the engine alone has written there.
TEST(LateGradients, OfWhatWasClearedAreAddedToTheirReduction) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(3);
    Weighed net;
    torch::manual_seed(3);
    Weighed twin;
    lock.unlock();
    world.impl().control->has_links = false;
    Engine engine(world, net, SGD{}, {.strategy = "zero3", .bucket_bytes = kTwo, .first_bucket_bytes = kTwo});
    engine.impl().units->gather_together(1 << 20);
    ASSERT_TRUE(engine.impl().units->asks());
    ASSERT_EQ(engine.impl().reducer->buckets().size(), 4U);
    ASSERT_EQ(engine.impl().reducer->buckets()[2].sinks.size(), 2U);
    for (const int times : {1, 3, 2}) {
      for (Weighed* each : {&net, &twin}) {
        each->weights[2].mutable_grad().reset();
        const Checkpoint::Body body = [each](const at::Tensor& x) {
          return torch::tanh(x * each->weights[1] + each->weights[2]);
        };
        at::Tensor h = torch::ones({2, 6}).requires_grad_() * each->weights[0];
        for (int i = 0; i < times; ++i) h = checkpoint(body, h);
        for (auto& layer : each->layers) h = torch::tanh(layer->forward(h));
        h.pow(2).sum().backward();
      }
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(at::allclose(engine.full_gradient(net.weights[i]), twin.weights[i].grad(), 1e-4, 1e-6))
            << i << ", " << times << " times";
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Parting,
                         testing::Values(std::pair("zero3", 2), std::pair("zero3", 3), std::pair("hsdp", 4)),
                         [](const auto& info) {
                           return info.param.first + std::string("_") + std::to_string(info.param.second);
                         });

}  // namespace
}  // namespace plumb::scenarios

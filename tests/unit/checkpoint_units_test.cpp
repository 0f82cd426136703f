// plumb::checkpoint around, inside and across units: the bits of the plain program, and everything released.
#include <gtest/gtest.h>

#include <functional>

#include "unit/support/net.h"
#include "unit/support/recompute.h"

namespace plumb {
namespace {

using namespace test;

struct UnitWay {
  const char* name;
  std::function<at::Tensor(Net&, const at::Tensor&, const Through&)> forward;
};

const std::vector<UnitWay>& unit_ways() {
  static const std::vector<UnitWay> all = {
      {"AroundOneUnitEach",
       [](Net& net, const at::Tensor& x, const Through& through) {
         auto h = through([unit = net.first](const at::Tensor& in) mutable { return unit(in); }, x);
         return through([unit = net.second](const at::Tensor& in) mutable { return unit->forward(in); }, h);
       }},
      {"AroundSeveralUnits",
       [](Net& net, const at::Tensor& x, const Through& through) {
         return through(
             [&net](const at::Tensor& in) {
               return net.first(net.table->forward(net.outer->forward(net.second->forward(net.first->forward(in)))));
             },
             x);
       }},
      {"InsideAUnit",
       [](Net& net, const at::Tensor& x, const Through& through) {
         UnitScope scope(unit::door_of(net.first.ptr()));
         BlockImpl* block = net.first.get();
         auto h = through([block](const at::Tensor& in) { return block->forward(in); }, x);
         return through([block](const at::Tensor& in) { return torch::tanh(block->up(in)).matmul(block->up->weight); },
                        h);
       }},
      {"InsideAUnitOfAUnit",
       [](Net& net, const at::Tensor& x, const Through& through) {
         AroundImpl* around = net.outer.get();
         BlockImpl* block = around->inner.get();
         UnitScope outer(unit::door_of(net.outer.ptr())), inner(unit::door_of(around->inner.ptr()));
         return through(
             [around, block](const at::Tensor& in) { return block->forward(in * around->scale) * around->scale; }, x);
       }},
      {"InsideAndAround",
       [](Net& net, const at::Tensor& x, const Through& through) {
         return through(
             [&net, through](const at::Tensor& in) {
               UnitScope scope(unit::door_of(net.first.ptr()));
               BlockImpl* block = net.first.get();
               auto h = through([block](const at::Tensor& a) { return block->forward(a); }, in);
               return net.second->forward(through([&net](const at::Tensor& a) { return net.outer->forward(a); }, h));
             },
             x);
       }},
      {"TiedUnitsAndAWeightAsInput",
       [](Net& net, const at::Tensor& x, const Through& through) {
         auto h = through(
             [&net](const at::Tensor& in) { return net.tied->forward(torch::tanh(net.table->forward(in))); }, x);
         UnitScope scope(unit::door_of(net.first.ptr()));
         return through(
             [](const at::Tensor& in, const at::Tensor& weight) { return torch::tanh(torch::linear(in, weight)); }, h,
             net.first.get()->up->weight);
       }},
  };
  return all;
}

class CheckpointUnits : public testing::TestWithParam<std::tuple<size_t, int, bool>> {};

// The gradients of the plain program on the same engine, bit by bit, and nothing gathered before, between and after.
TEST_P(CheckpointUnits, GiveTheBitsOfThePlainProgramAndReleaseEverything) {
  const auto& [index, ranks, together] = GetParam();
  const auto& forward = unit_ways()[index].forward;
  run_local(ranks, [&, together = together](World world) {
    std::vector<std::vector<at::Tensor>> results;
    for (bool recompute : {false, true}) {
      static std::mutex building;
      std::unique_lock lock(building);
      Net net;
      lock.unlock();
      Engine engine(world, net, SGD{.lr = 1e-3}, {.strategy = "zero3"});
      if (together && ranks > 1) engine.impl().units->gather_together(16 << 20);
      const at::Tensor x = at::randn({3, 6}, at::detail::createCPUGenerator(100 + world.rank()));
      std::vector<at::Tensor> found;
      for (int step = 0; step < 3; ++step) {
        auto input = x.clone().requires_grad_();
        auto y = forward(net, input, {recompute});
        EXPECT_TRUE(together || gathered(engine) == 0);  // a collective gathers ahead
        auto loss = y.pow(2).sum();
        if (step == 1) {
          auto g = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
          loss = loss + g.pow(2).sum();
        }
        loss.backward({}, true);
        EXPECT_EQ(gathered(engine), 0);
        y.sin().sum().backward();
        EXPECT_EQ(gathered(engine), 0);
        for (auto& p : net.parameters()) {
          if (const auto g = engine.full_gradient(p); g.defined()) found.push_back(g);
        }
        engine.step();
        engine.zero_grad();
      }
      for (auto& p : net.parameters()) found.push_back(engine.full_parameter(p));
      results.push_back(std::move(found));
    }
    ASSERT_EQ(results[0].size(), results[1].size());
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(at::isfinite(results[0][i]).all().item<bool>()) << i;  // or it would equal nothing
      EXPECT_TRUE(results[0][i].equal(results[1][i])) << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointUnits,
                         testing::Combine(testing::Range<size_t>(0, unit_ways().size()), testing::Values(1, 2, 3),
                                          testing::Bool()),
                         [](const auto& info) {
                           return std::string(unit_ways()[std::get<0>(info.param)].name) + "_" +
                                  std::to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) ? "_together" : "");
                         });

// Units inside a checkpoint save for it: nothing of theirs stays between forward and backward.
TEST(Checkpoint, KeepsNoActivationsOfUnitsInside) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(1);
    scenarios::Alike net(5);
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    const auto meter = std::make_shared<Meter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    const at::Tensor x = torch::ones({1 << 14, 6}).requires_grad_();
    const int64_t one = static_cast<int64_t>(x.nbytes()), begin = meter->now;
    auto y = checkpoint(
        [&net](at::Tensor h) {
          for (auto& layer : net.layers) {
            UnitScope scope(unit::door_of(layer.ptr()));
            h = torch::tanh(layer.get()->forward(h));
          }
          return h;
        },
        x);
    EXPECT_LT(meter->now - begin, 2 * one);  // its result
    y.sum().backward();
    EXPECT_TRUE(x.grad().defined());
  });
}

// A scope of single parameters around a checkpoint is entered again.
TEST(Checkpoint, FindsParametersThatWereGatheredAroundIt) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    const at::Tensor weight = net.first->up->weight;
    at::Tensor y;
    {
      const auto scope = engine.gathered({weight});
      y = checkpoint([weight](const at::Tensor& x) { return torch::tanh(torch::linear(x, weight)); },
                     torch::ones({2, 6}));
    }
    EXPECT_EQ(gathered(engine), 0);
    y.sum().backward();
    EXPECT_EQ(gathered(engine), 0);
    EXPECT_TRUE(engine.full_gradient(weight).defined());
    {
      BlockImpl* block = net.second.get();
      UnitScope around(unit::door_of(net.second.ptr()));
      const auto scope = engine.gathered({weight});
      y = checkpoint(
          [weight, block](const at::Tensor& x) { return torch::tanh(torch::linear(block->forward(x), weight)); },
          torch::ones({2, 6}));
    }
    EXPECT_EQ(gathered(engine), 0);
    y.sum().backward();
    EXPECT_EQ(gathered(engine), 0);
    EXPECT_TRUE(engine.full_gradient(net.second->up->weight).defined());
  });
}

}  // namespace
}  // namespace plumb

// Ways to walk a graph over units: the gradients of one process, and nothing gathered before, between or after.
#include <gtest/gtest.h>

#include <functional>
#include <mutex>

#include "unit/support/net.h"

namespace plumb {
namespace {

using namespace test;

using Pattern = std::function<void(Net&, const at::Tensor& x, const std::function<void()>& nothing_gathered)>;

// Gradients of the same pattern on plain libtorch, one process, all ranks' inputs.
struct Named {
  const char* name;
  Pattern run;
};

const std::vector<Named>& patterns() {
  static const std::vector<Named> all = {
      {"TheSameLossTwice",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         check();
         loss.backward({}, true);
         check();
         loss.backward();
         check();
       }},
      {"TwoLossesOverOneForward",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.forward(x);
         auto one = y.pow(2).sum(), two = y.sin().sum();
         one.backward({}, true);
         check();
         two.backward();
         check();
       }},
      {"ZeroingBetween",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.forward(x);
         auto one = y.pow(2).sum(), two = y.sin().sum();
         one.backward({}, true);
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         check();
         two.backward();
       }},
      {"ThroughAnIntermediateTensor",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto h = net.first->forward(x);
         auto y = net.second->forward(h);
         h.backward(torch::ones_like(h), true);
         check();
         y.sum().backward();
       }},
      {"AnAuxiliaryOutput",
       [](Net& net, const at::Tensor& x, const auto& check) {
         at::Tensor aux;
         auto y = [&] {
           auto h = net.first->up(x);
           aux = h.pow(2).mean();
           return net.second->forward(net.first->down(torch::tanh(h)));
         }();
         aux.backward({}, true);
         check();
         y.pow(2).sum().backward();
       }},
      {"NestedUnitsTwice",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.outer->forward(net.outer->forward(x));
         y.pow(2).sum().backward({}, true);
         check();
         y.sum().backward();
       }},
      {"TiedUnits",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.tied->forward(torch::tanh(net.table->forward(x)));
         check();
         y.pow(2).sum().backward({}, true);
         y.sum().backward();
       }},
      {"CheckpointInsideAUnit",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         auto y = net.second->forward(net.first->recomputed(input));
         check();
         y.pow(2).sum().backward();
         check();
       }},
      {"CheckpointAsTheOnlyNode",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         auto y = net.first->recomputed(input);
         y.backward(torch::ones_like(y), true);
         check();
         y.backward(torch::ones_like(y));
       }},
      {"CheckpointAroundUnits",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         const Checkpoint::Body body = [&](const at::Tensor& h) { return net.second->forward(net.first->forward(h)); };
         checkpoint(body, input).pow(2).sum().backward();
         check();
       }},
      {"DoubleBackward",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         auto loss = net.forward(input).pow(2).sum();
         auto g = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
         check();
         (loss + g.pow(2).sum()).backward();
         check();
       }},
      {"AnExceptionInTheMiddleThenRetry",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto h = net.first->forward(x);
         auto handle = h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
         auto loss = net.second->forward(h).pow(2).sum();
         EXPECT_ANY_THROW(loss.backward({}, true));
         check();
         h.remove_hook(handle);
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         net.forward(x).sum().backward();
       }},
      {"AnExceptionInsideANodeThenRetry",
       [](Net& net, const at::Tensor& x, const auto& check) {
         bool armed = true;
         auto loss = net.first->explosive(net.second->forward(x), armed).pow(2).sum();
         EXPECT_ANY_THROW(loss.backward({}, true));
         check();
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         loss.backward();
       }},
      {"AnExceptionInForwardThenRetry",
       [](Net& net, const at::Tensor& x, const auto& check) {
         EXPECT_ANY_THROW(net.first->forward(x.narrow(1, 0, 3)));
         check();
         net.forward(x).sum().backward();
       }},
      {"InPlaceOnTheOutput",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.first->forward(x);
         y.mul_(2);
         auto z = net.second->forward(y);
         z.relu_();
         z.sum().backward();
         check();
       }},
      {"EvaluationBetween",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         {
           at::NoGradGuard no_grad;
           net.forward(x);
         }
         {
           c10::InferenceMode inference;
           net.forward(x.clone());
         }
         check();
         loss.backward();
       }},
      {"AutogradGradOnly",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         torch::autograd::grad({loss}, {net.first->up->weight}, {}, true);
         check();
         loss.backward();
       }},
      {"NamedInputs",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         loss.backward({}, true, false, std::vector<at::Tensor>{net.second->up->weight});
         check();
         loss.backward();
       }},
      {"OneUnitManyTimes",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto h = x;
         for (int i = 0; i < 4; ++i) h = net.first->forward(h);
         h.sum().backward({}, true);
         check();
         h.pow(2).sum().backward();
       }},
  };
  return all;
}

class UnitPatterns : public testing::TestWithParam<std::tuple<size_t, int>> {};

TEST_P(UnitPatterns, GiveTheGradientsOfOneProcessAndReleaseEverything) {
  const auto& [index, ranks] = GetParam();
  const Pattern& pattern = patterns()[index].run;
  auto input = [](int rank) {
    auto generator = at::detail::createCPUGenerator(100 + rank);
    return at::randn({3, 6}, generator);
  };
  Net reference;
  std::vector<at::Tensor> expected(reference.parameters().size());
  for (int rank = 0; rank < ranks; ++rank) {
    pattern(reference, input(rank), [] {});
    size_t i = 0;
    for (auto& p : reference.parameters()) {
      at::Tensor& sum = expected[i++];
      if (p.grad().defined()) sum = sum.defined() ? sum + p.grad() : p.grad().clone();
    }
    for (auto& p : reference.parameters()) p.mutable_grad().reset();
  }
  run_local(ranks, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.0}, {.strategy = "zero3"});
    auto nothing_gathered = [&] { EXPECT_EQ(gathered(engine), 0) << "rank " << world.rank(); };
    nothing_gathered();
    pattern(net, input(world.rank()), nothing_gathered);
    nothing_gathered();
    size_t i = 0;
    for (auto& p : net.parameters()) {
      const at::Tensor whole = engine.full_gradient(p);
      const at::Tensor& sum = expected[i++];
      ASSERT_EQ(whole.defined(), sum.defined());
      if (!whole.defined()) continue;
      EXPECT_TRUE(at::allclose(whole, sum / ranks, 1e-4, 1e-5)) << "parameter " << i - 1;
    }
    nothing_gathered();
  });
}

INSTANTIATE_TEST_SUITE_P(All, UnitPatterns,
                         testing::Combine(testing::Range<size_t>(0, patterns().size()), testing::Values(2, 3)),
                         [](const auto& info) {
                           return std::string(patterns()[std::get<0>(info.param)].name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace plumb

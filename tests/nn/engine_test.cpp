// Fused modules with an engine: what was put off and never came is an error at step().
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <mutex>

#include "engine/impl.h"
#include "plumb/nn.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

class FusedEngine : public testing::TestWithParam<std::string> {};

TEST_P(FusedEngine, StepNamesAWeightGradientThatWasPutOff) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(5);
    nn::Linear linear(nn::LinearOptions{.in = 4, .out = 3, .bias = true, .delay_wgrad_compute = true});
    lock.unlock();
    Engine engine(world, *linear, SGD{.lr = 0.1}, {.strategy = GetParam()});
    linear->forward(torch::ones({2, 4})).sum().backward();
    try {
      engine.step();
      ADD_FAILURE() << "a step without its weight gradient";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("'weight'"), testing::HasSubstr("backward_dw()")));
    }
    linear->backward_dw();  // nothing is lost: the step can be taken now
    engine.step();
    EXPECT_TRUE(engine.full_gradient(linear->weight).defined());
  });
}

TEST_P(FusedEngine, TheKernelWritesTheBucketItself) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(5);
    nn::Linear linear(nn::LinearOptions{.in = 4, .out = 3, .bias = false});
    lock.unlock();
    Engine engine(world, *linear, NoOptimizer{}, {.strategy = GetParam()});
    int seen = 0;
    linear->weight.register_hook([&](const at::Tensor& gradient) { seen += gradient.defined(); });
    for (int i = 0; i < 2; ++i) linear->forward(torch::full({2, 4}, world.rank() + 1.0)).sum().backward();
    EXPECT_EQ(seen, 0);  // autograd never saw a gradient
    EXPECT_TRUE(engine.full_gradient(linear->weight).eq(2 * 2 * 1.5).all().item<bool>());
  });
}

struct Stack : torch::nn::Module {
  explicit Stack(bool delayed) {
    for (auto* layer : {&first, &second, &third}) {
      *layer = register_module(
          "layer" + std::to_string(layers++),
          nn::Linear(nn::LinearOptions{.in = 8, .out = 8, .bias = true, .delay_wgrad_compute = delayed}));
    }
  }
  at::Tensor loss(const at::Tensor& x) {
    return third->forward(second->forward(first->forward(x).tanh()).tanh()).pow(2).sum();
  }
  void backward_dw() {
    for (auto* layer : {&first, &second, &third}) (*layer)->backward_dw();
  }
  int layers = 0;
  Unit<nn::Linear> first{nullptr}, second{nullptr}, third{nullptr};
};

// One scope makes backward and backward_dw one pass: after it .grad is the mean, as if nothing had been put off.
TEST_P(FusedEngine, APassHoldsABackwardAndWhatItPutOff) {
  run_local(2, [](World world) {
    static std::mutex building;
    const auto play = [&](bool delayed) {
      std::unique_lock lock(building);
      torch::manual_seed(5);
      Stack stack(delayed);
      const at::Tensor x = at::randn({4, 8});
      lock.unlock();
      Engine engine(world, stack, SGD{.lr = 0.1},
                    {.strategy = GetParam(), .bucket_bytes = 300, .first_bucket_bytes = 300});
      std::vector<at::Tensor> seen;
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro < 2; ++micro) {
          const auto pass = engine.pass();
          engine.backward(stack.loss(x * (world.rank() + step + 1)));
          if (delayed) stack.backward_dw();
        }
        for (const at::Tensor& parameter : stack.parameters()) seen.push_back(engine.full_gradient(parameter));
        engine.step();
        engine.zero_grad();
      }
      for (const at::Tensor& parameter : stack.parameters()) seen.push_back(engine.full_parameter(parameter));
      return seen;
    };
    const auto wanted = play(false), got = play(true);
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].allclose(wanted[i], 1e-5, 1e-6)) << i;
  });
}

// Nor is it waited for: a bucket is on its way as soon as backward_dw() has brought what was missing, beside the rest of the pass.
TEST_P(FusedEngine, AReductionBeginsWithTheLastGradientThatWasPutOff) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(5);
    Stack stack(true);
    lock.unlock();
    Engine engine(world, stack, SGD{.lr = 0.1},
                  {.strategy = GetParam(), .bucket_bytes = 400, .first_bucket_bytes = 400});
    const auto begun = [&] { return engine.impl().reducer->progress().launched; };
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      ASSERT_EQ(engine.impl().reducer->buckets().size(), 3U) << "one for each layer";
      const auto pass = engine.pass();
      engine.backward(stack.loss(at::ones({4, 8}) * (world.rank() + 1)));
      EXPECT_EQ(begun(), 0);
      stack.third->backward_dw();
      EXPECT_EQ(begun(), 1);
      stack.second->backward_dw();
      EXPECT_EQ(begun(), 2);
      stack.first->backward_dw();
      EXPECT_EQ(begun(), 2) << "the last bucket goes with the end of the pass";
    }
    engine.step();
  });
}

TEST_P(FusedEngine, APassThatIsLeftByAnExceptionLeavesNobodyWaiting) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(5);
    Stack stack(true);
    lock.unlock();
    Engine engine(world, stack, SGD{.lr = 0.1}, {.strategy = GetParam()});
    try {
      const auto pass = engine.pass();
      engine.backward(stack.loss(at::ones({2, 8})));
      if (world.rank() == 1) throw std::runtime_error("the user's own");
      stack.backward_dw();
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(world.rank() == 1 ? "the user's own" : "failed on rank 1"));
    }
    if (world.rank() == 1) stack.backward_dw();
    engine.zero_grad();
    {
      const auto pass = engine.pass();
      engine.backward(stack.loss(at::ones({2, 8})));
      stack.backward_dw();
    }
    engine.step();
  });
}

// Without the scope, what comes between two passes costs a second reduction of its own bucket, and is not read unreduced.
TEST_P(FusedEngine, WhatComesAfterItsPassIsNotTakenForReduced) {
  if (GetParam() != "ddp" && GetParam() != "zero1") GTEST_SKIP() << "sharded: .grad is whole until the next reduction";
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(5);
    Stack stack(true);
    lock.unlock();
    Engine engine(world, stack, SGD{.lr = 0.1},
                  {.strategy = GetParam(), .bucket_bytes = 300, .first_bucket_bytes = 300});
    stack.loss(at::ones({2, 8})).backward();
    stack.first->backward_dw();
    EXPECT_TRUE(engine.full_gradient(stack.third->bias).defined());
    try {
      (void)engine.full_gradient(stack.first->weight);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("while gradients of backward_dw() wait for their reduction"));
    }
    stack.second->backward_dw();
    stack.third->backward_dw();
    engine.step();
    EXPECT_TRUE(engine.full_gradient(stack.first->weight).defined());
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, FusedEngine, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

// Fused modules with an engine: what was put off and never came is an error at step().
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

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

INSTANTIATE_TEST_SUITE_P(Strategies, FusedEngine, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

// Contract 3 from the third entrance: raw gradients obey the leaf's dtype rule, in every strategy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

struct Weights : torch::nn::Module {
  Weights() {
    a = register_parameter("a", torch::zeros({5, 7}, at::kBFloat16));
    b = register_parameter("b", torch::zeros({33}, at::kBFloat16));
  }
  at::Tensor a, b;
};

struct Holder : torch::nn::Module {
  Holder() { weights = register_module("weights", std::make_shared<Weights>()); }
  Unit<Weights> weights{nullptr};
};

using Rule = std::optional<std::optional<at::ScalarType>>;  // outer: unset

class Deliver : public testing::TestWithParam<std::string> {};

TEST_P(Deliver, ObeysTheRuleOfTheLeaf) {
  for (const Rule& rule : {Rule{}, Rule{at::kFloat}, Rule{at::kBFloat16}, Rule{std::optional<at::ScalarType>{}}}) {
    run_local(2, [&](World world) {
      Holder model;
      const at::Tensor a = model.weights->a;
      Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
      auto set = [&](const Rule& one) {
        if (one) a.set_grad_dtype(*one);
      };
      set(rule);                                               // after the engine was built: it follows
      const auto raw = torch::full({5, 7}, 1.0 + 1.0 / 1024);  // a bf16 cannot hold it
      engine.deliver(a, raw);
      engine.deliver(model.weights->b, torch::ones({33}));
      engine.end_pass();
      const at::Tensor whole = engine.full_gradient(a);
      const bool rounded = !rule || (*rule && **rule == at::kBFloat16);
      EXPECT_EQ(whole.scalar_type(), rounded ? at::kBFloat16 : at::kFloat);
      EXPECT_TRUE(whole.to(at::kFloat).eq(rounded ? 1.0F : 1.0F + 1.0F / 1024).all().item<bool>());
      for (const Bucket& bucket : engine.impl().reducer->buckets()) {
        if (!bucket.gradient.defined()) continue;
        EXPECT_EQ(bucket.gradient.scalar_type(), bucket.dtype);
      }
    });
  }
}

TEST_P(Deliver, SumsMicroBatchesInTheAccumulationDtype) {
  run_local(2, [&](World world) {
    Holder model;
    const at::Tensor b = model.weights->b;
    Options options{.strategy = GetParam()};
    options.accumulate_dtype = at::kFloat;
    Engine engine(world, model, NoOptimizer{}, options);
    for (int i = 0; i < 512; ++i) {
      engine.deliver(b, torch::ones({33}, at::kBFloat16));
      if (i % 4 == 3) engine.end_pass();
    }
    EXPECT_TRUE(engine.full_gradient(b).eq(512.0).all().item<bool>());  // bf16 would stop at 256
  });
}

TEST_P(Deliver, RanksWithDifferentRulesAreAnErrorOnEveryRank) {
  int told = 0;
  std::mutex mutex;
  try {
    run_local(2, [&](World world) {
      Holder model;
      const at::Tensor a = model.weights->a;
      Engine engine(world, model, NoOptimizer{}, {.strategy = GetParam()});
      if (world.rank() == 1) a.set_grad_dtype(at::kFloat);
      engine.deliver(a, torch::ones({5, 7}));
      try {
        engine.end_pass();
      } catch (const Error& error) {
        std::lock_guard lock(mutex);
        told += std::string(error.what()).find("grad_dtype") != std::string::npos;
        throw;
      }
    });
    ADD_FAILURE() << "ranks with different rules went on";
  } catch (const Error&) {
  }
  EXPECT_GE(told, 1);
}

INSTANTIATE_TEST_SUITE_P(Strategies, Deliver, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

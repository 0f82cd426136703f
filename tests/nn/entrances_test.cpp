// Contract 3: one gradient gives the same numbers through autograd, deliver() and an operation that writes it itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <mutex>
#include <optional>

#include "plumb/nn.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Dtype = std::optional<at::ScalarType>;
using Rule = std::optional<Dtype>;  // outer: unset; inner: None

// Hands autograd `raw` as the weight's gradient, whatever dtype it has.
struct ByAutograd : torch::autograd::Function<ByAutograd> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& raw) {
    (void)weight;
    context->save_for_backward({raw});
    return at::zeros({});
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    return {context->get_saved_variables()[0], {}};
  }
};

// Writes it into the buffer that the weight's sink offers, as a kernel would: sums in the buffer's dtype.
struct ByItself : torch::autograd::Function<ByItself> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& raw) {
    context->save_for_backward({raw});
    context->saved_data["dtype"] = static_cast<int64_t>(weight.scalar_type());
    context->saved_data["sink"] = reinterpret_cast<int64_t>(sink_of(weight).get());
    return at::zeros({});
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    auto* const sink = reinterpret_cast<FusedSink*>(context->saved_data["sink"].toInt());
    const GradTarget target = sink->open();
    const auto own = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const at::ScalarType given = target.buffer.scalar_type();
    EXPECT_TRUE(given == own || given == at::kFloat) << "operations write " << own << " or Float, not " << given;
    const at::Tensor raw = context->get_saved_variables()[0];
    target.accumulate ? target.buffer.add_(raw) : target.buffer.copy_(raw);
    sink->wrote();
    return {{}, {}};
  }
};

enum class Entrance { autograd, deliver, fused };

struct Weights : torch::nn::Module {
  explicit Weights(at::ScalarType dtype) {
    weight = register_parameter("weight", torch::zeros({5, 7}, dtype));
    other = register_parameter("other", torch::zeros({9}, dtype));
  }
  at::Tensor weight, other;
};
struct Holder : torch::nn::Module {
  explicit Holder(at::ScalarType dtype) { weights = register_module("weights", std::make_shared<Weights>(dtype)); }
  Unit<Weights> weights{nullptr};
};

struct Setting {
  at::ScalarType dtype;
  Rule rule;
  Dtype accumulate;
};

// The whole gradient of rank 0 after each of two backwards with these raw gradients, rank r's times r + 1.
std::vector<at::Tensor> through(Entrance entrance, const std::string& strategy, const Setting& setting,
                                const std::vector<at::Tensor>& raws) {
  std::vector<at::Tensor> result;
  std::mutex mutex;
  run_local(2, [&](World world) {
    Holder model(setting.dtype);
    const at::Tensor weight = model.weights->weight, other = model.weights->other;
    if (setting.rule) weight.set_grad_dtype(*setting.rule);
    Engine engine(world, model, NoOptimizer{}, {.strategy = strategy, .accumulate_dtype = setting.accumulate});
    for (const at::Tensor& raw : raws) {
      const at::Tensor mine = raw * (world.rank() + 1);
      if (entrance == Entrance::deliver) {
        engine.deliver(weight, mine);
        engine.end_pass();
      } else {
        const at::Tensor loss =
            entrance == Entrance::autograd ? ByAutograd::apply(weight, mine) : ByItself::apply(weight, mine);
        loss.backward();
      }
      const at::Tensor whole = engine.full_gradient(weight);
      const std::lock_guard lock(mutex);
      if (world.rank() == 0) result.push_back(whole);
    }
  });
  return result;
}

class Entrances : public testing::TestWithParam<std::string> {};

TEST_P(Entrances, GiveTheSameNumbersUnderEveryRule) {
  torch::manual_seed(3);
  // Halves and sums of two are exact, so that only the rule rounds; f32 values that bf16 cannot hold.
  const at::Tensor raw = at::randn({5, 7});
  const std::vector<Setting> settings = {
      {at::kBFloat16, {}, {}},
      {at::kBFloat16, {}, at::kFloat},
      {at::kBFloat16, Dtype(at::kBFloat16), at::kFloat},
      {at::kBFloat16, Dtype(at::kFloat), {}},
      {at::kBFloat16, Dtype(at::kFloat), at::kFloat},
      {at::kBFloat16, Rule(Dtype()), {}},
      {at::kBFloat16, Rule(Dtype()), at::kFloat},
      {at::kFloat, {}, {}},
      {at::kFloat, {}, at::kDouble},
      {at::kFloat, Dtype(at::kBFloat16), {}},
      {at::kFloat, Dtype(at::kBFloat16), at::kFloat},
      {at::kFloat, Rule(Dtype()), {}},
  };
  for (const Setting& s : settings) {
    const std::string what =
        c10::str("a ", s.dtype, " weight, rule ", s.rule ? (*s.rule ? c10::str(**s.rule) : "None") : "unset",
                 ", accumulate ", s.accumulate ? c10::str(*s.accumulate) : "unset");
    const auto autograd = through(Entrance::autograd, GetParam(), s, {raw, raw});
    const auto delivered = through(Entrance::deliver, GetParam(), s, {raw, raw});
    const auto fused = through(Entrance::fused, GetParam(), s, {raw, raw});
    // One contribution, by hand: rounded by the rule on each rank, then the mean.
    const Dtype cast = s.rule ? *s.rule : Dtype(s.dtype);
    const auto ruled = [&](const at::Tensor& one) { return (cast ? one.to(*cast) : one).to(at::kDouble); };
    const at::Tensor mean = (ruled(raw) + ruled(raw * 2)) / 2;
    const bool exact = fused[0].scalar_type() != at::kBFloat16;
    for (const auto* all : {&autograd, &delivered, &fused}) {
      ASSERT_EQ(all->size(), 2U);
      EXPECT_EQ((*all)[0].scalar_type(), fused[0].scalar_type()) << what;
      EXPECT_TRUE((*all)[0].to(at::kDouble).allclose(mean, exact ? 1e-7 : 1e-2, exact ? 1e-7 : 1e-2)) << what;
      EXPECT_TRUE((*all)[0].equal(autograd[0])) << what << ", entrance "
                                                << (all == &autograd ? 0
                                                    : all == &fused  ? 2
                                                                     : 1);
    }
    EXPECT_TRUE(delivered[1].equal(autograd[1])) << what;
    // A kernel that adds in bf16 rounds once where others round twice.
    if (exact) {
      EXPECT_TRUE(fused[1].equal(autograd[1])) << what;
    } else {
      EXPECT_TRUE(fused[1].to(at::kFloat).allclose(autograd[1].to(at::kFloat), 1.0 / 64, 1e-2)) << what;
    }
  }
}

// The real module: what its kernel makes is rounded by the rule, once for each micro-batch, before sums are kept in f32.
TEST_P(Entrances, RoundTheModulesGradientBeforeItIsSummed) {
  const auto play = [&](bool delayed, bool fused) {
    at::Tensor result;
    std::mutex mutex;
    run_local(2, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      torch::manual_seed(5);
      nn::Linear linear(nn::LinearOptions{.in = 8, .out = 8, .bias = false, .delay_wgrad_compute = delayed});
      linear->to(at::kBFloat16);
      const at::Tensor x = at::randn({40, 8}).to(at::kBFloat16);
      lock.unlock();
      Engine engine(world, *linear, NoOptimizer{}, {.strategy = GetParam(), .accumulate_dtype = at::kFloat});
      if (!fused) attach(linear->weight, nullptr);
      for (int micro = 0; micro < 3; ++micro) {
        linear->forward(x * (world.rank() + 1)).pow(2).sum().backward();
        if (delayed) linear->backward_dw();
      }
      if (delayed) engine.step();
      const at::Tensor whole = engine.full_gradient(linear->weight);
      const std::lock_guard guard(mutex);
      if (world.rank() == 0) result = whole;
    });
    return result;
  };
  const at::Tensor plain = play(false, false), fused = play(false, true);
  EXPECT_EQ(fused.scalar_type(), at::kFloat);
  EXPECT_TRUE(fused.equal(plain));
  // Weights are not updated, and the order of sums differs: the mean of three, and the last two reduced together.
  EXPECT_TRUE(play(true, true).allclose(plain, 1e-5, 1e-4));
}

INSTANTIATE_TEST_SUITE_P(Strategies, Entrances, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

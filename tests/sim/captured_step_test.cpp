// Steps that are captured into a graph: refused where a replay would do something else than the first time, and otherwise
// those of the CPU. The simulated device cannot capture; the test says that it does, and what a replay would write is
// written at once.
#include <gmock/gmock.h>

#include <functional>

#include "lane/lane.h"
#include "plumb/plumb.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

bool capturing_now = false;

class CapturedStep : public testing::Test {
 protected:
  void SetUp() override {
    capturing_now = false;
    ask_about_graphs([](const c10::Stream&) -> uint64_t { return capturing_now ? 1 : 0; });
  }
  void TearDown() override {
    capturing_now = false;
    ask_about_graphs(nullptr);
  }

  // An engine of two parameters in one bucket, on this device.
  struct Trained {
    Trained(c10::Device device, const Optimizer& optimizer, at::ScalarType dtype = at::kFloat, Options options = {})
        : a(start(20, device, dtype)), b(start(9, device, dtype)),
          engine(World(), NamedTensors{{"a", a}, {"b", b}}, {}, optimizer, std::move(options)) {}
    static at::Tensor start(int64_t size, c10::Device device, at::ScalarType dtype) {
      return at::arange(size, at::kFloat).sin().to(dtype).to(device).requires_grad_();
    }
    // Gradients of the first, of the second, or of both.
    void deliver(bool first, bool second, double value) {
      for (const auto& [wanted, parameter] : {std::pair(first, a), std::pair(second, b)}) {
        if (wanted) engine.deliver(parameter, at::full(parameter.sizes(), value).to(parameter.options()));
      }
      if (first || second) {
        engine.end_pass();
      } else {
        engine.backward({});
      }
    }
    void step(bool captured = false) {
      capturing_now = captured;
      (void)engine.step();
      capturing_now = false;
    }
    std::string refused() {
      try {
        step(true);
      } catch (const Error& error) {
        capturing_now = false;
        return error.what();
      }
      return "none";
    }
    at::Tensor a, b;
    Engine engine;
  };

  Session session{3};
};

TEST_F(CapturedStep, NeedsMemoryThatIsLaidOut) {
  Trained one(device(0), AdamW{});
  one.deliver(true, true, 1);
  EXPECT_THAT(one.refused(), AllOf(HasSubstr("before the memory of its parameters is laid out"), HasSubstr("'")));
  one.step();
  one.engine.zero_grad();
  one.deliver(true, true, 1);
  EXPECT_EQ(one.refused(), "none");
}

TEST_F(CapturedStep, DoesNotBeginAMomentum) {
  for (const double momentum : {0.5, 0.0}) {
    Trained one(device(0), SGD{.lr = 0.1, .momentum = momentum});
    one.deliver(true, false, 1);
    one.step();
    one.engine.zero_grad();
    one.deliver(true, true, 1);
    const std::string said = one.refused();
    if (momentum == 0) {
      EXPECT_EQ(said, "none");
      continue;
    }
    EXPECT_THAT(said, AllOf(HasSubstr("first gradient of parameter 'b'"), HasSubstr("begins its momentum")));
    one.step();
    one.engine.zero_grad();
    one.deliver(true, true, 1);
    EXPECT_EQ(one.refused(), "none");
  }
  Trained adam(device(0), AdamW{});
  adam.deliver(true, false, 1);
  adam.step();
  adam.engine.zero_grad();
  adam.deliver(true, true, 1);
  EXPECT_EQ(adam.refused(), "none") << "nothing else is begun";
}

TEST_F(CapturedStep, DoesNotCopyWhatWasChangedSinceTheLastStep) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool away : {true, false}) {
      Trained one(device(0), AdamW{}, dtype);
      one.deliver(true, true, 1);
      one.step();
      one.engine.zero_grad();
      one.deliver(true, true, 1);
      if (away) {
        one.b.set_data(one.b.detach().clone());
      } else {
        at::NoGradGuard no_grad;
        one.b.mul_(2);
      }
      const std::string said = one.refused();
      // A parameter that is what is updated may change in place: the next replay goes on from there.
      if (away || dtype == at::kBFloat16) {
        EXPECT_THAT(said, HasSubstr("parameter 'b' was changed since the last step")) << dtype;
        one.step();
        one.engine.zero_grad();
        one.deliver(true, true, 1);
        EXPECT_EQ(one.refused(), "none") << dtype;
      } else {
        EXPECT_EQ(said, "none");
      }
    }
  }
}

TEST_F(CapturedStep, IsRefusedWhereTheHostDecidesByNumbersOfTheDevice) {
  const auto said = [](Options options) {
    Trained one(device(0), SGD{.lr = 0.1}, at::kFloat, std::move(options));
    for (int i = 0; i < 2; ++i) {
      one.deliver(true, true, one.engine.loss_scale());
      if (i == 1) return one.refused();
      one.step();
      one.engine.zero_grad();
    }
    return std::string();
  };
  EXPECT_EQ(said({}), "none");
  EXPECT_EQ(said({.clip_norm = 1}), "none");
  EXPECT_THAT(said({.loss_scale = LossScale{}}), HasSubstr("with loss scaling"));
  EXPECT_THAT(said({.nonfinite = NonFinite::skip}), HasSubstr("gradients that are not finite"));
  EXPECT_THAT(said({.nonfinite = NonFinite::error}), HasSubstr("gradients that are not finite"));
  EXPECT_THAT(said({.clip_norm = 1, .deterministic = true, .virtual_ranks = 1}), HasSubstr("deterministic clipping"));
  EXPECT_EQ(said({.deterministic = true, .virtual_ranks = 1}), "none");
}

// Whichever of two neighbours a captured step updates, and whatever comes before and after it.
TEST_F(CapturedStep, IsThatOfTheCpu) {
  const std::vector<Optimizer> optimizers = {SGD{.lr = 0.1, .momentum = 0.9}, Adam{.lr = 0.05}, AdamW{.lr = 0.05},
                                             RMSprop{.lr = 0.05, .momentum = 0.5, .centered = true}};
  for (size_t which = 0; which < optimizers.size(); ++which) {
    for (unsigned captured = 1; captured < 4; ++captured) {
      std::vector<at::Tensor> ends;
      for (const c10::Device place : {c10::Device(at::kCPU), device(0)}) {
        Trained one(place, optimizers[which]);
        const std::vector<unsigned> used = {3, captured, 3, 3 - captured, 3};
        for (size_t step = 0; step < used.size(); ++step) {
          one.deliver((used[step] & 1U) != 0, (used[step] & 2U) != 0, 0.3 + static_cast<double>(step));
          one.step(step == 1 && !place.is_cpu());
          one.engine.zero_grad();
        }
        ends.push_back(at::cat({one.a.detach().cpu(), one.b.detach().cpu()}));
      }
      EXPECT_TRUE(at::allclose(ends[1], ends[0], 1e-5, 1e-6)) << "optimizer " << which << ", captured " << captured;
    }
  }
}

// On a device the host does not look at the norm: what is below the limit is multiplied by one.
TEST_F(CapturedStep, OrNotClipsToTheLimitAndNoFurther) {
  for (const double limit : {1.0, 13.0, 14.0, 1000.0}) {
    const at::Tensor weight = at::ones({20}).to(device(0)).requires_grad_();
    Engine engine(World(), NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, {.clip_norm = limit});
    engine.deliver(weight, at::full({20}, 3.0).to(device(0)));
    engine.end_pass();
    EXPECT_NEAR(engine.step().grad_norm.item<double>(), 3 * std::sqrt(20.0), 1e-4);
    const double factor = std::min(1.0, limit / (3 * std::sqrt(20.0)));
    EXPECT_TRUE(at::allclose(weight.detach().cpu(), at::full({20}, 1 - 3 * factor), 1e-5, 1e-5)) << limit;
  }
}

}  // namespace
}  // namespace plumb::sim

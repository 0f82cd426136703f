// The engine under InferenceMode: everything that trains goes on training, or says that it cannot.
#include <gmock/gmock.h>
#include <stdlib.h>

#include <gtest/gtest.h>
#include <filesystem>

#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;
using testing::HasSubstr;

std::vector<at::Tensor> gradients(double value) {
  std::vector<at::Tensor> all;
  for (const auto* shapes : {&Parts::kInside, &Parts::kOutside}) {
    for (const auto& shape : *shapes) all.push_back(at::full(shape, value, at::kDouble));
  }
  return all;
}

// Which calls are made under InferenceMode.
enum Call { construction = 1, backwards = 2, stepping = 4, clearing = 8, gathering = 16, plainly = 32 };

std::vector<at::Tensor> train(const World& world, const std::string& strategy, int calls) {
  const auto under = [&](Call call, const std::function<void()>& action) {
    std::optional<c10::InferenceMode> mode;
    if (calls & call) mode.emplace();
    action();
  };
  Parts model(3);
  Options options;
  options.strategy = strategy;
  options.clip_norm = 1;
  options.loss_scale = LossScale{.initial = 16};
  options.bucket_bytes = options.first_bucket_bytes = 200;
  std::optional<Engine> engine;
  under(construction, [&] { engine.emplace(world, model, AdamW{.lr = 0.1}, options); });
  std::vector<at::Tensor> whole;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      std::optional<NoSync> quiet;
      if (micro == 0) quiet.emplace(*engine);
      const at::Tensor loss = model.loss(gradients(step + micro + world.rank() + 0.5));
      EXPECT_TRUE(loss.requires_grad()) << "step " << step;
      under(backwards, [&] {
        if (calls & plainly) {
          engine->scale(loss).backward();
        } else {
          engine->backward(loss);
        }
      });
    }
    under(gathering, [&] { engine->full_gradient(model.parameters()[0]); });
    under(stepping, [&] { EXPECT_FALSE(engine->step().skipped); });
    under(gathering, [&] {
      whole.clear();
      for (const auto& p : model.parameters()) whole.push_back(engine->full_parameter(p));
      const Gathered scope = engine->gathered({model.parameters()[0], model.parameters()[4]}, Access::write);
      at::NoGradGuard no_grad;
      if (world.rank() == 0) model.parameters()[4].mul_(2);
    });
    if (step == 1) under(clearing, [&] { engine->zero_grad(); });
    for (const auto& p : model.parameters()) {
      EXPECT_FALSE(p.is_inference());
      EXPECT_TRUE(p.requires_grad());
    }
  }
  under(gathering, [&] {
    whole.clear();
    for (const auto& p : model.parameters()) whole.push_back(engine->full_parameter(p));
  });
  return whole;
}

class InferenceIn : public testing::TestWithParam<std::string> {};

TEST_P(InferenceIn, EveryCallGivesWhatItGivesOutsideOfIt) {
  for (const int ranks : {1, 2}) {
    run_local(ranks, [&](World world) {
      const auto expected = train(world, GetParam(), 0);
      for (const int calls : {+construction, +backwards, backwards | plainly, +stepping, +clearing, +gathering,
                              construction | backwards | stepping | clearing | gathering}) {
        const auto found = train(world, GetParam(), calls);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(found[i].equal(expected[i])) << GetParam() << " on " << ranks << ", calls " << calls << ", " << i;
          EXPECT_FALSE(found[i].is_inference());
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, InferenceIn, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

TEST(Inference, ALossWithoutAGraphIsAnErrorOnEveryRank) {
  for (const int bad : {0, 1}) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor weight = at::ones({3}).requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{});
      at::Tensor loss = weight.sum();
      if (world.rank() == bad) {
        const c10::InferenceMode mode;
        loss = (weight * 2).sum();
      }
      engine.backward(loss);
    });
    EXPECT_THAT(texts[bad], HasSubstr("InferenceMode"));
    EXPECT_THAT(texts[1 - bad], HasSubstr("failed on rank " + std::to_string(bad)));
  }
}

TEST(Inference, AModelMadeUnderItIsRefused) {
  at::Tensor weight;
  {
    const c10::InferenceMode mode;
    weight = at::ones({3}).requires_grad_();
  }
  try {
    Engine engine(World(), NamedTensors{{"w", weight}}, {}, SGD{});
    ADD_FAILURE() << "it could never be trained";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("'w'"), HasSubstr("InferenceMode")));
  }
}

TEST(Inference, ABufferMadeUnderItIsBroadcast) {
  run_local(2, [](World world) {
    at::Tensor weight = at::ones({3}).requires_grad_();
    at::Tensor buffer;
    {
      const c10::InferenceMode mode;
      buffer = at::full({2}, world.rank() + 7.0);
    }
    Engine engine(world, NamedTensors{{"w", weight}}, NamedTensors{{"b", buffer}}, SGD{});
    EXPECT_TRUE(buffer.eq(7).all().item<bool>());
  });
}

// In gaps or one element behind the other.
TEST(Inference, ABufferMadeUnderItIsLoaded) {
  std::string path = testing::TempDir() + "plumb-inference-XXXXXX";
  ASSERT_NE(mkdtemp(path.data()), nullptr);
  at::Tensor weight = at::ones({3}).requires_grad_();
  at::Tensor dense, gaps;
  {
    const c10::InferenceMode mode;
    dense = at::full({2, 3}, 7.0);
    gaps = at::full({2, 6}, 7.0).narrow(1, 0, 3);
  }
  Engine engine(World(), NamedTensors{{"w", weight}}, NamedTensors{{"dense", dense}, {"gaps", gaps}}, SGD{});
  engine.save(path);
  for (const bool weights_alone : {false, true}) {
    {
      const c10::InferenceMode mode;
      dense.zero_();
      gaps.zero_();
    }
    weights_alone ? engine.load_weights(path) : engine.load(path);
    EXPECT_TRUE(dense.eq(7).all().item<bool>() && gaps.eq(7).all().item<bool>());
  }
  std::filesystem::remove_all(path);
}

}  // namespace
}  // namespace plumb

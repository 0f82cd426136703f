// The user's communication hook in the place of the all-reduce; and ranks that sit passes out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include "libtorch.h"

#include <numeric>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

using Answer = std::function<at::Tensor(c10d::GradBucket&)>;

// Answers at once.
class Hook final : public c10d::CommHookInterface {
 public:
  explicit Hook(Answer answer) : answer_(std::move(answer)) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(answer_(bucket));
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  Answer answer_;
};

torch::nn::Linear make_model() {
  torch::nn::Linear model(3, 2);
  model->to(at::kDouble);
  at::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(0.5);
  return model;
}

Reducer& reducer_of(Engine& engine) { return *engine.impl().reducer; }

at::Tensor input(double value) { return at::full({1, 3}, value, at::kDouble); }

TEST(CommHook, GetsEachBucketOnceUndividedAndItsAnswerIsTheGradient) {
  run_local(2, [](World world) {
    auto model = make_model();
    Engine engine(world, *model);
    int calls = 0;
    reducer_of(engine).use_hook(std::make_unique<Hook>([&](c10d::GradBucket& bucket) {
      ++calls;
      EXPECT_EQ(bucket.getParameters().size(), bucket.getGradients().size());
      for (size_t i = 0; i < bucket.getGradients().size(); ++i) {
        const bool weight = bucket.getParameters()[i].dim() == 2;
        // This rank's own, not divided by anything.
        EXPECT_DOUBLE_EQ(bucket.getGradients()[i].max().item<double>(), weight ? world.rank() + 1.0 : 1.0);
      }
      return (bucket.getBuffer() * 10.0).to(at::kFloat);  // elsewhere, and in another dtype
    }));
    model(input(world.rank() + 1.0)).sum().backward();
    EXPECT_EQ(calls, static_cast<int>(reducer_of(engine).buckets().size()));
    EXPECT_DOUBLE_EQ(model->weight.grad().max().item<double>(), 10.0 * (world.rank() + 1.0));
    EXPECT_EQ(model->weight.grad().scalar_type(), at::kDouble);
  });
}

// Hooks with a state of their own (PowerSGD) count buckets, and do something else at the last.
TEST(CommHook, IsToldWhichBucketItGetsAndWhatLiesWhere) {
  run_local(2, [](World world) {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 3), torch::nn::Linear(3, 1));
    Engine engine(world, *model, NoOptimizer{}, {.bucket_bytes = 200, .first_bucket_bytes = 100});
    const size_t count = reducer_of(engine).buckets().size();
    ASSERT_GT(count, 2u);
    std::vector<size_t> indices, last;
    size_t elements = 0;
    reducer_of(engine).use_hook(std::make_unique<Hook>([&](c10d::GradBucket& bucket) {
      indices.push_back(bucket.getIndex());
      if (bucket.isLast()) last.push_back(bucket.getIndex());
      const std::vector<at::Tensor> gradients = bucket.getGradients(), parameters = bucket.getParameters();
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].sizes(), parameters[i].sizes());
        EXPECT_TRUE(gradients[i].is_alias_of(bucket.getBuffer()));
        gradients[i].fill_(static_cast<double>(parameters[i].numel()));
        elements += static_cast<size_t>(parameters[i].numel());
      }
      return bucket.getBuffer();
    }));
    model->forward(at::ones({2, 5})).sum().backward();
    std::vector<size_t> all(count);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(indices, all) << "in their order";
    EXPECT_EQ(last, std::vector<size_t>{count - 1});
    EXPECT_EQ(elements, 5u * 7 + 7 + 7 * 3 + 3 + 3 + 1);
    for (const at::Tensor& p : model->parameters()) {
      EXPECT_TRUE(p.grad().eq(static_cast<double>(p.numel())).all().item<bool>()) << p.sizes();
    }
  });
}

TEST(CommHook, ThatThrowsFailsTheBackwardOnEveryRank) {
  run_local(2, [](World world) {
    auto model = make_model();
    Engine engine(world, *model);
    reducer_of(engine).use_hook(std::make_unique<Hook>([&](c10d::GradBucket& bucket) -> at::Tensor {
      if (world.rank() == 0) throw std::runtime_error("the hook is tired");
      return bucket.getBuffer();
    }));
    EXPECT_THAT([&] { model(input(1.0)).sum().backward(); },
                ThrowsMessage<std::exception>(HasSubstr(world.rank() == 0 ? "the hook is tired" : "failed on rank 0")));
  });
}

TEST(CommHook, ThatAnswersTooLittleIsAnError) {
  run_local(1, [](World world) {
    auto model = make_model();
    Engine engine(world, *model);
    reducer_of(engine).use_hook(std::make_unique<Hook>([](c10d::GradBucket&) { return at::zeros({1}); }));
    EXPECT_THAT([&] { model(input(1.0)).sum().backward(); },
                ThrowsMessage<Error>(HasSubstr("made 1 numbers of a bucket")));
  });
}

TEST(CommHook, IsRefusedWhereGradientsAreSharded) {
  run_local(2, [](World world) {
    auto model = make_model();
    Engine engine(world, *model, SGD{}, {.strategy = "zero2"});
    EXPECT_THAT([&] { reducer_of(engine).use_hook(std::make_unique<Hook>(Answer{})); },
                ThrowsMessage<Error>(HasSubstr("whole gradients")));
  });
}

// Rank 1 runs out after the first backward; rank 0 goes on.
double gradient_of_rank_0(bool clears, int divisor) {
  double result = 0;
  run_local(2, [&](World world) {
    auto model = make_model();
    Engine engine(world, *model);
    Reducer& reducer = reducer_of(engine);
    model(input(world.rank() + 1.0)).sum().backward();  // the mean is 1.5
    reducer.divide_by(divisor);
    for (int i = 0; i < 2; ++i) {
      if (world.rank() == 0) {
        if (clears) model->zero_grad();
        model(input(4.0)).sum().backward();
      } else {
        const at::Tensor before = model->weight.grad();
        reducer.sit_out();
        EXPECT_TRUE(model->weight.grad().is_same(before));  // the user's own is left alone
      }
    }
    if (world.rank() == 0) result = model->weight.grad().max().item<double>();
  });
  return result;
}

TEST(Absence, ContributesNothingWhileTheOthersGoOn) {
  EXPECT_DOUBLE_EQ(gradient_of_rank_0(true, 2), 2.0);
  EXPECT_DOUBLE_EQ(gradient_of_rank_0(true, 1), 4.0);
}

TEST(Absence, LeavesTheMeanThatTheOthersAddToAsItIs) {
  EXPECT_DOUBLE_EQ(gradient_of_rank_0(false, 2), 1.5 + 2.0 + 2.0);
}

TEST(Absence, HandsOverWhatNoSyncHeldBackFirst) {
  run_local(2, [](World world) {
    auto model = make_model();
    Engine engine(world, *model);
    {
      const NoSync held(engine);
      model(input(world.rank() + 1.0)).sum().backward();
    }
    if (world.rank() == 0) {
      model(input(4.0)).sum().backward();
      EXPECT_DOUBLE_EQ(model->weight.grad().max().item<double>(), (1.0 + 4.0 + 2.0) / 2);
    } else {
      reducer_of(engine).sit_out();
    }
  });
}

}  // namespace
}  // namespace plumb

// The ledger names every failure the engine could have: each is injected into a real run.
#include "grad/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "errors.h"
#include "plumb/nn.h"
#include "scenarios/support/models.h"

namespace plumb {
namespace {

using scenarios::Net;
using testing::AllOf;
using testing::HasSubstr;

enum class Held { no, yes };

// What rank 0 of two says when the fault strikes in the second step.
std::string error_of(Fault fault, Held held = Held::no) {
  std::string text = "no error";
  run_local(2, [&](World world) {
    torch::nn::Linear first(4, 4), second(4, 3);
    torch::nn::Sequential model(first, second);
    Options options;
    options.bucket_bytes = options.first_bucket_bytes = 130;  // two parameters each
    Engine engine(world, *model, SGD{}, options);
    try {
      for (int step = 0; step < 3; ++step) {
        if (step == 1) engine.impl().reducer->fault = fault;
        {
          std::unique_ptr<NoSync> guard;
          if (held == Held::yes) guard = std::make_unique<NoSync>(engine);
          model->forward(torch::ones({2, 4})).pow(2).sum().backward();
        }
        engine.step();
        engine.zero_grad();
      }
    } catch (const Error& error) {
      if (world.rank() == 0) text = error.what();
    }
  });
  return text;
}

MATCHER(NamesTheContribution, "names rank, parameter, backward and step") {
  return arg.find("rank 0") != std::string::npos &&
         (arg.find(".weight'") != std::string::npos || arg.find(".bias'") != std::string::npos) &&
         arg.find("backward 1 of step 1") != std::string::npos;
}

TEST(Ledger, FindsNothingInAGoodRun) {
  EXPECT_EQ(error_of(Fault::none), "no error");
  EXPECT_EQ(error_of(Fault::none, Held::yes), "no error");
}
TEST(Ledger, NamesADroppedDelivery) {
  EXPECT_THAT(error_of(Fault::drop_delivery),
              AllOf(NamesTheContribution(), HasSubstr("dropped: 1 delivered, 0 reached")));
}
TEST(Ledger, NamesADoubledDelivery) {
  EXPECT_THAT(error_of(Fault::double_delivery),
              AllOf(NamesTheContribution(), HasSubstr("doubled: 1 delivered, 2 reached")));
}
TEST(Ledger, NamesABucketReducedEarly) {
  EXPECT_THAT(error_of(Fault::reduce_early), AllOf(NamesTheContribution(), HasSubstr("reduced early")));
}
TEST(Ledger, NamesABucketReducedTwice) {
  EXPECT_THAT(error_of(Fault::reduce_twice), AllOf(NamesTheContribution(), HasSubstr("reduced twice")));
}
TEST(Ledger, NamesABucketNeverReduced) {
  EXPECT_THAT(error_of(Fault::reduce_never), AllOf(NamesTheContribution(), HasSubstr("never reduced")));
}
TEST(Ledger, NamesAGradientConsumedUnreduced) {
  EXPECT_THAT(error_of(Fault::consume_unreduced, Held::yes),
              AllOf(NamesTheContribution(), HasSubstr("consumed unreduced")));
}
// One that comes between backwards, from a backward_dw(), is on the account, too.
TEST(Ledger, NamesADelayedGradientConsumedUnreduced) {
  const auto texts = test::errors(2, [](World world) {
    nn::Linear linear(nn::LinearOptions{.in = 4, .out = 3, .delay_wgrad_compute = true});
    Engine engine(world, *linear, SGD{});
    for (int step = 0; step < 2; ++step) {
      if (step == 1) engine.impl().reducer->fault = Fault::consume_unreduced;
      linear->forward(torch::ones({2, 4})).sum().backward();
      linear->backward_dw();
      engine.step();
      engine.zero_grad();
    }
  });
  EXPECT_THAT(texts, testing::Each(AllOf(HasSubstr("'weight'"), HasSubstr("consumed unreduced"))));
}
TEST(Ledger, NamesAGradientConsumedTwice) {
  EXPECT_THAT(error_of(Fault::consume_twice), AllOf(NamesTheContribution(), HasSubstr("consumed 2 times")));
}
TEST(Ledger, NamesAGradientNeverConsumed) {
  EXPECT_THAT(error_of(Fault::consume_never), AllOf(NamesTheContribution(), HasSubstr("never consumed")));
}

}  // namespace
}  // namespace plumb

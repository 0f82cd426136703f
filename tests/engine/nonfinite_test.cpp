// A gradient that is not finite, on one rank: all of them end the step, leave it out, or take it, as Options::nonfinite says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;
using testing::AllOf;
using testing::HasSubstr;

class NonFiniteIn : public testing::TestWithParam<std::tuple<std::string, double>> {
 protected:
  // Good, bad on rank 1 alone, good: gradients of 2, 2 with one `bad`, 5.
  void plays(NonFinite what, const std::function<void(Engine&, const World&)>& at_the_bad_step, double drop) {
    run_local(2, [&](World world) {
      Parts model(5);
      std::vector<at::Tensor> before;
      for (const auto& p : model.parameters()) before.push_back(p.detach().clone());
      Options options;
      options.strategy = std::get<0>(GetParam());
      options.nonfinite = what;
      options.bucket_bytes = options.first_bucket_bytes = 200;
      Engine engine(world, model, SGD{.lr = 1}, options);
      engine.backward(model.loss(ones(2)));
      EXPECT_FALSE(engine.step().skipped);
      engine.zero_grad();
      auto bad = ones(2);
      if (world.rank() == 1) bad[3].view(-1)[0] = std::get<1>(GetParam());
      engine.backward(model.loss(ones(2)) * 0);
      engine.backward(model.loss(bad));
      at_the_bad_step(engine, world);
      engine.zero_grad();
      engine.backward(model.loss(ones(5)));
      EXPECT_FALSE(engine.step().skipped);
      const auto parameters = model.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_LT(distance(engine.full_parameter(parameters[i]), before[i] - drop), 1e-12)
            << "rank " << world.rank() << ", parameter " << i;
      }
    });
  }
};

TEST_P(NonFiniteIn, SkipLeavesTheUpdateOutOnEveryRank) {
  plays(
      NonFinite::skip,
      [](Engine& engine, const World&) {
        EXPECT_TRUE(engine.step().skipped);
        EXPECT_EQ(engine.steps(), 2);  // it counts, as for a schedule
      },
      7);
}

TEST_P(NonFiniteIn, ErrorNamesStepAndParameterOnEveryRankAndChangesNothing) {
  plays(
      NonFinite::error,
      [](Engine& engine, const World& world) {
        try {
          engine.step();
          ADD_FAILURE() << "no error on rank " << world.rank();
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), AllOf(HasSubstr("step 1: the gradient of '"), HasSubstr("is not finite"),
                                          HasSubstr("(that of rank 1 was not, in backward 2, before it was summed)"),
                                          HasSubstr("nothing was updated")));
          EXPECT_THAT(error.what(), testing::Not(HasSubstr("', '"))) << "one parameter alone";
        }
        EXPECT_EQ(engine.steps(), 1);
      },
      7);
}

INSTANTIATE_TEST_SUITE_P(Strategies, NonFiniteIn,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2", "zero3"),
                                          testing::Values(std::numeric_limits<double>::quiet_NaN(),
                                                          -std::numeric_limits<double>::infinity())));

// Five are named, and of more their number is told.
TEST(NonFinite, ErrorNamesAFewOfManyParameters) {
  for (size_t count = 1; count <= 8; ++count) {
    const auto texts = errors(2, [&](World world) {
      Parts model(5);
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero2", .nonfinite = NonFinite::error});
      auto gradients = ones(2);
      size_t poisoned = 0;
      for (at::Tensor& one : gradients) {
        if (one.numel() == 0 || poisoned == count) continue;
        one.fill_(NAN);
        ++poisoned;
      }
      engine.backward(model.loss(gradients));
      engine.step();
    });
    for (const std::string& text : texts) {
      size_t named = 0;
      for (size_t at = 0; (at = text.find(".w", at)) != std::string::npos; ++at) ++named;
      EXPECT_EQ(named, std::min<size_t>(count, 5)) << text;
      const std::string more = " and " + std::to_string(count - std::min<size_t>(count, 5)) + " more";
      EXPECT_EQ(text.find(" more") != std::string::npos, count > 5) << text;
      if (count > 5) {
        EXPECT_THAT(text, HasSubstr(more));
      }
    }
  }
}

// Whose it was, though each rank has everybody's sum in the end: of the first pass that had one, and of no gradient that was
// cleared.
TEST(NonFinite, ErrorNamesTheRankThatBroughtItFirst) {
  struct Played {
    std::vector<int> bad;  // the rank of each backward
    size_t cleared;        // so many backwards are
    const char* named;
  };
  const Played all[] = {{{2, 0}, 0, "rank 2"}, {{-1, 1}, 0, "rank 1"}, {{0, 2}, 1, "rank 2"}};
  for (const char* strategy : {"ddp", "zero2", "zero3", "deterministic"}) {
    for (const Played& played : all) {
      Options options{.strategy = strategy, .nonfinite = NonFinite::error};
      if (std::string(strategy) == "deterministic") {
        if (played.bad[0] != -1) continue;  // its shares are summed at step() alone
        options.strategy = "zero1";
        options.deterministic = true;
        options.virtual_ranks = 4;
      }
      options.bucket_bytes = options.first_bucket_bytes = 200;
      const auto texts = errors(options.deterministic ? 2 : 3, [&](World world) {
        Parts model(5);
        Engine engine(world, model, SGD{.lr = 1}, options);
        for (size_t i = 0; i < played.bad.size(); ++i) {
          auto gradients = ones(2);
          if (world.rank() == played.bad[i]) gradients[3].view(-1)[0] = NAN;
          engine.backward(model.loss(gradients));
          if (i + 1 == played.cleared) engine.zero_grad();
        }
        engine.step();
      });
      for (const std::string& text : texts) {
        EXPECT_THAT(text, HasSubstr(c10::str("(that of ", played.named, " was not"))) << strategy;
      }
    }
  }
}

// Of this step: what an earlier one was mended of is not looked at again.
TEST(NonFinite, ErrorNamesNobodyOfAnEarlierStep) {
  for (const char* strategy : {"ddp", "zero2", "zero3"}) {
    const auto texts = errors(3, [&](World world) {
      Parts model(5);
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = strategy, .nonfinite = NonFinite::error});
      const auto poisoned = [&](int rank) {
        auto gradients = ones(2);
        if (world.rank() == rank) gradients[3].view(-1)[0] = NAN;
        return model.loss(gradients);
      };
      engine.backward(poisoned(0));
      model.parameters()[3].mutable_grad().reset();  // the others stay
      EXPECT_FALSE(engine.step().skipped);
      engine.backward(model.loss(ones(2)));
      engine.backward(poisoned(2));
      engine.step();
    });
    EXPECT_THAT(texts, testing::Each(HasSubstr("(that of rank 2 was not, in backward 2, before it was summed)")))
        << strategy;
  }
}

// What was written after the sum is nobody's.
TEST(NonFinite, ErrorNamesNoRankWhereNoneBroughtIt) {
  for (const std::string& text : errors(2, [](World world) {
         at::Tensor weight = at::ones({4}, at::kDouble).requires_grad_();
         Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, Options{.nonfinite = NonFinite::error});
         engine.backward(weight.sum());
         weight.mutable_grad().mul_(NAN);
         engine.step();
       })) {
    EXPECT_THAT(text, HasSubstr("the gradient of 'w' is not finite, and Options::nonfinite is error"));
  }
}

TEST(NonFinite, ProceedTakesTheStepAsItIs) {
  run_local(2, [](World world) {
    at::Tensor weight = at::ones({4}, at::kDouble).requires_grad_();
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, Options{});
    engine.backward((weight * (world.rank() == 1 ? NAN : 1.0)).sum());
    EXPECT_FALSE(engine.step().skipped);
    EXPECT_TRUE(weight.isnan().all().item<bool>());
  });
}

}  // namespace
}  // namespace plumb

// The ledger names every failure the engine could have: each is injected into a real run.
#include "grad/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

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

// ---- The account alone: any legal program balances, and does not once one entry is left out or made twice.

struct Entry {
  enum class Kind { deliver, settle, late, reduce, consume };
  Kind kind;
  int which = 0;  // parameter or bucket
};
struct PassOfEntries {
  std::vector<Entry> entries;
  Ledger::Sync sync = Ledger::Sync::reduced;
};
struct StepOfEntries {
  std::vector<PassOfEntries> passes;
  std::vector<Entry> consumed;
  std::vector<bool> active;
};

constexpr int kParameters = 5, kBuckets = 2;
const std::vector<int> kBucketOf = {0, 0, 1, 1, 1};

// A step whose last pass is reduced. Some parameters get nothing; one bucket may have late gradients.
StepOfEntries some_step(std::mt19937_64& random) {
  using Kind = Entry::Kind;
  StepOfEntries step;
  std::vector<bool> delivered(kParameters);
  const size_t passes = 1 + random() % 3;
  for (size_t pass = 0; pass < passes; ++pass) {
    PassOfEntries one;
    one.sync = pass + 1 < passes && random() % 2 ? Ledger::Sync::held : Ledger::Sync::reduced;
    const auto bring = [&](int bucket) {
      for (int parameter = 0; parameter < kParameters; ++parameter) {
        if (kBucketOf[parameter] != bucket || random() % 3 == 0) continue;
        for (uint64_t times = 1 + random() % 2; times > 0; --times) {
          one.entries.push_back({Kind::deliver, parameter});
          one.entries.push_back({Kind::settle, parameter});
        }
        delivered[parameter] = true;
      }
    };
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      bring(bucket);
      if (one.sync == Ledger::Sync::held) continue;
      one.entries.push_back({Kind::reduce, bucket});
      if (random() % 2) continue;
      one.entries.push_back({Kind::late, bucket});
      bring(bucket);
      one.entries.push_back({Kind::reduce, bucket});
    }
    step.passes.push_back(one);
  }
  for (int parameter = 0; parameter < kParameters; ++parameter) {
    step.active.push_back(delivered[parameter] || random() % 2);  // kept from before, or assigned
    if (delivered[parameter]) step.consumed.push_back({Kind::consume, parameter});
  }
  return step;
}

std::string judged(const std::vector<StepOfEntries>& steps) {
  Ledger ledger(3, Ledger::Mode::on);
  ledger.arrange({"p0", "p1", "p2", "p3", "p4"}, kBucketOf, kBuckets);
  try {
    for (size_t step = 0; step < steps.size(); ++step) {
      for (size_t pass = 0; pass < steps[step].passes.size(); ++pass) {
        ledger.open_pass(static_cast<int64_t>(step), static_cast<int64_t>(pass) + 1);
        for (const Entry& entry : steps[step].passes[pass].entries) {
          switch (entry.kind) {
            case Entry::Kind::deliver:
              ledger.delivered(entry.which);
              break;
            case Entry::Kind::settle:
              ledger.settled(entry.which);
              break;
            case Entry::Kind::late:
              ledger.late(entry.which);
              break;
            default:
              ledger.reduced(entry.which);
          }
        }
        ledger.close_pass(steps[step].passes[pass].sync);
      }
      for (const Entry& entry : steps[step].consumed) ledger.consumed(entry.which);
      ledger.close_step(steps[step].active);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(LedgerProperty, BalancesForEveryLegalProgramAndForNoOther) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::vector<StepOfEntries> steps;
    for (int i = 0; i < 3; ++i) steps.push_back(some_step(random));
    ASSERT_EQ(judged(steps), "");

    StepOfEntries& step = steps[random() % 3];
    const bool twice = random() % 2;
    if (random() % 4 == 0 && !step.consumed.empty()) {
      const auto at = step.consumed.begin() + static_cast<ptrdiff_t>(random() % step.consumed.size());
      const std::string name = "'p" + std::to_string(at->which) + "'";
      twice ? void(step.consumed.insert(at, *at)) : void(step.consumed.erase(at));
      EXPECT_THAT(judged(steps),
                  AllOf(HasSubstr("rank 3"), HasSubstr(name), HasSubstr(twice ? "2 times" : "never consumed")));
      continue;
    }
    PassOfEntries& pass = step.passes[random() % step.passes.size()];
    if (pass.entries.empty()) continue;
    const auto at = pass.entries.begin() + static_cast<ptrdiff_t>(random() % pass.entries.size());
    const Entry entry = *at;
    if (entry.kind == Entry::Kind::late && twice) continue;     // said once or twice, it is late
    if (entry.kind == Entry::Kind::reduce && !twice) continue;  // the other of two may cover for it; see below
    twice ? void(pass.entries.insert(at, entry)) : void(pass.entries.erase(at));
    if (entry.kind == Entry::Kind::late) {
      EXPECT_THAT(judged(steps), testing::AnyOf(HasSubstr("reduced early"), HasSubstr("reduced twice")));
    } else if (entry.kind == Entry::Kind::reduce) {
      EXPECT_THAT(judged(steps), testing::AnyOf(HasSubstr("reduced early"), HasSubstr("reduced twice")));
    } else {
      const bool more = twice == (entry.kind == Entry::Kind::settle);
      const std::string name = "'p" + std::to_string(entry.which) + "'";
      EXPECT_THAT(judged(steps), AllOf(HasSubstr("rank 3"), HasSubstr(name), HasSubstr(more ? "doubled" : "dropped")));
    }
  }
}

TEST(LedgerProperty, MissesAReductionThatNeverBegan) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::vector<StepOfEntries> steps = {some_step(random)};
    PassOfEntries& pass = steps[0].passes.back();  // reduced
    const int bucket = static_cast<int>(random() % kBuckets);
    const auto of_bucket = [&](const Entry& entry) {
      return entry.kind == Entry::Kind::deliver && kBucketOf[entry.which] == bucket;
    };
    const bool delivered = std::ranges::any_of(pass.entries, of_bucket);
    std::erase_if(pass.entries, [&](const Entry& e) { return e.kind == Entry::Kind::reduce && e.which == bucket; });
    // What earlier passes held is not reduced then, either.
    bool held = false;
    for (const PassOfEntries& one : steps[0].passes) {
      if (one.sync == Ledger::Sync::held) held = held || std::ranges::any_of(one.entries, of_bucket);
      if (one.sync == Ledger::Sync::reduced && &one != &pass) held = false;
    }
    if (delivered) {
      EXPECT_THAT(judged(steps), HasSubstr("never reduced: no reduction of bucket " + std::to_string(bucket)));
    } else {
      EXPECT_THAT(judged(steps), held ? HasSubstr("consumed unreduced") : testing::Matcher<std::string>(""));
    }
  }
}

TEST(LedgerProperty, ForgetsAPassThatFailedAndIsSilentWhenItIsOff) {
  for (const Ledger::Mode mode : {Ledger::Mode::on, Ledger::Mode::off}) {
    Ledger ledger(0, mode);
    ledger.arrange({"a", "b"}, {0, 0}, 1);
    ledger.open_pass(0, 1);
    ledger.delivered(0);
    ledger.abandon_pass();
    ledger.close_step({true, true});
    ledger.open_pass(1, 1);
    if (mode == Ledger::Mode::off) ledger.delivered(1);
    ledger.reduced(0);
    ledger.reduced(0);
    if (mode == Ledger::Mode::on) {
      EXPECT_THAT([&] { ledger.close_pass(Ledger::Sync::reduced); },
                  testing::ThrowsMessage<Error>(HasSubstr("2 reductions of bucket 0 began, 1 due")));
    } else {
      ledger.close_pass(Ledger::Sync::reduced);
      ledger.consumed(1);
      ledger.consumed(1);
      ledger.close_step({true, true});
    }
  }
}

}  // namespace
}  // namespace plumb

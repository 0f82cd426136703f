// Every strategy on every number of ranks: the same losses, and in deterministic mode the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kStrategies = {"ddp", "zero1", "zero2", "zero3", "hsdp"};
const std::vector<std::string> kRanks = {"1", "2", "4"};

// Two blocks, and so little clipping that every step is clipped.
Result train(const std::string& strategy, const std::string& ranks, const Words& more) {
  Words words = tiny({"--json", "--layers", "2", "--batch", "16", "--clip", "0.05", "--weight-decay", "0.1", "--lr",
                      "0.01", "--eval-every", "0", "--questions", "8", "--strategy", strategy, "--ranks", ranks});
  words.insert(words.end(), more.begin(), more.end());
  return run(words);
}

void expect_clipped(const Result& result) {
  for (const auto& line : result.lines()) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("step")) {
      EXPECT_GT(json["grad_norm"], 0.05);
    }
  }
}

void expect_same_curve(const Result& expected, const Result& found) {
  ASSERT_EQ(found.code, 0) << found.err;
  const auto x = expected.losses(), y = found.losses();
  ASSERT_EQ(x.size(), y.size());
  ASSERT_EQ(x.size(), 6u);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-5 * std::abs(x[i])) << "step " << i + 1;
}

TEST(Strategy, LosesTheSameOnOneTwoAndFourRanks) {
  const Result one = train("ddp", "1", {"--backend", "local"});
  expect_clipped(one);
  for (const std::string& ranks : kRanks) {
    for (const std::string& strategy : kStrategies) {
      SCOPED_TRACE(strategy + " on " + ranks);
      expect_same_curve(one, train(strategy, ranks, {"--backend", "local"}));
    }
  }
}

// Losses and digest to the last bit, in every strategy, dense or with experts.
TEST(Strategy, RecomputedBlocksGiveTheSameBits) {
  for (const std::string model : {"gpt", "moe"}) {
    for (const std::string& strategy : kStrategies) {
      SCOPED_TRACE(model + " " + strategy);
      const Words words = {"--backend", "local", "--model", model};
      Words more = words;
      more.push_back("--recompute");
      const Result plain = train(strategy, "2", words), recomputed = train(strategy, "2", more);
      ASSERT_EQ(recomputed.code, 0) << recomputed.err;
      EXPECT_EQ(recomputed.losses(), plain.losses());
      EXPECT_EQ(recomputed.last()["model_digest"], plain.last()["model_digest"]);
    }
  }
}

TEST(Strategy, LosesTheSameInProcesses) {
  const Result one = train("ddp", "1", {});
  for (const std::string& strategy : kStrategies) {
    SCOPED_TRACE(strategy);
    expect_same_curve(one, train(strategy, strategy == "hsdp" ? "4" : "2", {}));
  }
}

TEST(Strategy, LosesTheSameWithMicroBatchesReducedOrHeld) {
  const Result one = train("ddp", "1", {});
  for (const std::string strategy : {"zero2", "zero3"}) {
    SCOPED_TRACE(strategy);
    const Words local = {"--backend", "local", "--accumulate", "4"};
    expect_same_curve(one, train(strategy, "2", local));
    expect_same_curve(one, train(strategy, "2", {"--backend", "local", "--accumulate", "4", "--hold-unsharded"}));
  }
}

TEST(Deterministic, GivesTheSameBitsInEveryStrategyOnOneTwoAndFourRanks) {
  const Result one = train("ddp", "1", {"--deterministic"});
  ASSERT_EQ(one.code, 0) << one.err;
  expect_clipped(one);
  const Words how = {"--deterministic", "--backend", "local", "--threads", "2"};
  for (const std::string& ranks : kRanks) {
    for (const std::string& strategy : kStrategies) {
      SCOPED_TRACE(strategy + " on " + ranks);
      const Result other = train(strategy, ranks, how);
      ASSERT_EQ(other.code, 0) << other.err;
      EXPECT_EQ(other.last()["model_digest"], one.last()["model_digest"]);
      EXPECT_EQ(other.losses(), one.losses());
    }
  }
}

TEST(Deterministic, GivesTheSameBitsInProcesses) {
  const Result one = train("zero3", "1", {"--deterministic"});
  for (const std::string& strategy : kStrategies) {
    SCOPED_TRACE(strategy);
    const Result other = train(strategy, strategy == "hsdp" ? "4" : "2", {"--deterministic"});
    ASSERT_EQ(other.code, 0) << other.err;
    EXPECT_EQ(other.last()["model_digest"], one.last()["model_digest"]);
    EXPECT_EQ(other.losses(), one.losses());
  }
}

TEST(Deterministic, GivesTheSameBitsInBfloat16) {
  const Words how = {"--deterministic", "--dtype", "bf16", "--backend", "local"};
  const auto one = train("ddp", "1", how).last()["model_digest"];
  for (const std::string& strategy : kStrategies) EXPECT_EQ(train(strategy, "4", how).last()["model_digest"], one);
}

TEST(Deterministic, OtherSharesAreOtherBits) {
  const Words how = {"--deterministic", "--backend", "local", "--virtual-ranks"};
  const auto digest = [&](const std::string& shares, const std::string& ranks) {
    Words words = how;
    words.push_back(shares);
    return train("zero2", ranks, words).last()["model_digest"];
  };
  EXPECT_EQ(digest("4", "1"), digest("4", "4"));
  EXPECT_NE(digest("4", "1"), digest("8", "1"));
}

TEST(Memory, IsWhatTheEstimateSaid) {
  for (const std::string backend : {"local", "gloo"}) {
    for (const std::string& strategy : kStrategies) {
      SCOPED_TRACE(strategy + " on " + backend);
      const std::string ranks = strategy == "hsdp" && backend == "local" ? "4" : "2";
      const Result result = train(strategy, ranks, {"--width", "256", "--steps", "2", "--backend", backend});
      ASSERT_EQ(result.code, 0) << result.err;
      const auto last = result.last();
      const double predicted = last["predicted_bytes"]["held"];
      for (const double measured : last["measured_bytes"]) EXPECT_NEAR(measured, predicted, 0.05 * predicted);
    }
  }
}

TEST(Memory, IsToldBeforeTheRun) {
  const Words model = {"--layers", "2", "--heads", "2", "--width", "128", "--context", "16"};
  Words words = {"estimate", "--json", "--ranks", "2", "--strategy", "zero3"};
  words.insert(words.end(), model.begin(), model.end());
  const auto told = run(words).last();
  const auto seen = train("zero3", "2", {"--width", "128", "--steps", "1", "--backend", "local"}).last();
  EXPECT_EQ(told["params"], seen["params"]);
  ASSERT_EQ(told["estimates"].size(), 1u);
  for (const auto& [key, value] : seen["predicted_bytes"].items()) EXPECT_EQ(told["estimates"][0][key], value) << key;
}

TEST(Memory, OfEveryStrategyIsOneTable) {
  const Result table = run({"estimate", "--params", "7B", "--ranks", "8", "--dtype", "bf16"});
  EXPECT_EQ(table.code, 0) << table.err;
  for (const std::string& strategy : kStrategies) EXPECT_THAT(table.out, HasSubstr("\n  " + strategy + " "));
  EXPECT_EQ(run({"estimate", "--json"}).last()["estimates"].size(), kStrategies.size());
}

}  // namespace

}  // namespace plumb::test

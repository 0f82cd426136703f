// What the program says of its messages, and a link of another kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/support/program.h"

namespace plumb::test {
namespace {

using ::testing::HasSubstr;

Words small(const std::string& strategy, const Words& more = {}) {
  Words words = {"train",       "--json", "--ranks", "2",  "--strategy",   strategy, "--layers", "2",
                 "--heads",     "2",      "--width", "16", "--context",    "32",     "--steps",  "4",
                 "--questions", "8",      "--batch", "8",  "--eval-every", "0"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// One message beside the reductions of a backward and one at the step, whatever the strategy; and every kind's bytes count.
TEST(WireOfARun, SaysWhatAStepWaitsForAndSends) {
  for (const std::string strategy : {"ddp", "zero3"}) {
    SCOPED_TRACE(strategy);
    const Result result = run(small(strategy), {{"PLUMB_SHM", "0"}});
    ASSERT_EQ(result.code, 0) << result.err;
    const auto wire = result.last().at("wire");
    EXPECT_EQ(wire.at("blocking_waits_per_step"), 2);
    EXPECT_EQ(wire.at("control_rounds_per_step"), 2);
    double bytes = 0;
    for (const char* kind : {"data", "control", "gather", "store"}) bytes += wire.at(kind).at("bytes").get<double>();
    EXPECT_DOUBLE_EQ(wire.at("bytes_per_step").get<double>(), bytes);
    // Each sends to the other what it holds of gradients, or of parameters: all in all, as many bytes as the model has.
    const double model = result.last().at("params").get<double>() * 4;
    EXPECT_GE(wire.at("data").at("bytes").get<double>(), strategy == "ddp" ? model : model / 2);
    EXPECT_EQ(wire.at("gather").at("bytes").get<double>() > 0, strategy == "zero3");
  }
}

// The rounds of a step are its messages' one after the other: two of the reduction, one at the step.
TEST(WireOfARun, ThatTakesLongerThanTheTimeOutEndsTheRun) {
  const Result result = run(tiny({"--ranks", "2", "--timeout", "2", "--shape", "latency=90s"}));
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, testing::HasSubstr("PLUMB_SHAPE makes the link so slow"));
}

TEST(WireOfARun, ALinkOfAnotherKindTakesItsTimeAndChangesNoNumber) {
  const Result plain = run(small("ddp")), shaped = run(small("ddp", {"--shape", "latency=60ms,gbps=10"}));
  ASSERT_EQ(plain.code, 0) << plain.err;
  ASSERT_EQ(shaped.code, 0) << shaped.err;
  EXPECT_GE(shaped.last().at("step_ms_median").get<double>(), 3 * 60);
  EXPECT_EQ(shaped.last().at("backend"), "tcp");
  EXPECT_EQ(shaped.last().at("wire").at("control_rounds_per_step"), 2);
  EXPECT_EQ(shaped.losses().size(), plain.losses().size());
  for (const std::string nonsense : {"latency=60", "gbps=fast", "colour=red"}) {
    const Result refused = run(small("ddp", {"--shape", nonsense}));
    EXPECT_NE(refused.code, 0) << nonsense;
    EXPECT_THAT(refused.err, HasSubstr(nonsense.substr(0, nonsense.find('=')))) << nonsense;
    EXPECT_TRUE(refused.losses().empty()) << nonsense;
  }
}

}  // namespace
}  // namespace plumb::test

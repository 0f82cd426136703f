// What a run tells of its time: the timeline, the account of a step, and the model of the cost beside what is counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Processes without shared memory, as on two machines.
const Environment kApart = {{"PLUMB_SHM", "0"}};

TEST(TraceOfARun, HoldsEveryRankAndSaysWhereTheTimeWent) {
  const Scratch scratch;
  const Result result = run(tiny({"--json", "--ranks", "2", "--strategy", "zero3", "--steps", "4", "--questions", "8",
                                  "--trace", scratch.path("trace.json"), "--out", scratch.path("run")}),
                            kApart);
  ASSERT_EQ(result.code, 0) << result.err;
  std::map<std::pair<int, std::string>, int> rows;
  const auto trace = nlohmann::json::parse(text_of(scratch.path("trace.json")));
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "M") ++rows[{event.at("pid"), event.at("cat")}];
  }
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ((rows[{rank, "steps"}]), 4);
    for (const char* row : {"program", "gradients", "buckets", "gathers", "control"}) {
      EXPECT_GE((rows[{rank, row}]), 4) << row;
    }
  }
  const auto spent = result.last().at("time_spent_ms");
  ASSERT_EQ(spent.size(), 2u);
  for (const auto& one : spent) {
    double sum = 0;
    for (const char* kind : {"compute", "data", "gathers", "control", "optimizer"}) sum += one.at(kind).get<double>();
    EXPECT_NEAR(one.at("step"), sum, 1e-6);
    EXPECT_GT(one.at("compute"), 0);
    EXPECT_GT(one.at("control"), 0);
    EXPECT_EQ(one.at("waited_for").size(), 2u);
  }
  const std::string page = text_of(scratch.path("run/report.html"));
  EXPECT_THAT(page, AllOf(HasSubstr("Where a step's time goes"), HasSubstr("\"time_spent_ms\":[{\"step\":")));
}

// The disk is full when it ends: the run has failed, and tells what it learned all the same.
TEST(TraceOfARun, ThatCannotBeWrittenAtTheEndCostsNothingElse) {
  const Scratch scratch;
  const Result result = run(tiny({"--json", "--ranks", "2", "--steps", "3", "--questions", "8", "--trace", "/dev/full",
                                  "--out", scratch.path("run")}));
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("cannot write the trace to '/dev/full': No space left on device"));
  EXPECT_EQ(result.last()["steps"], 3);
  EXPECT_TRUE(scratch.has("run/report.html"));
}

TEST(TraceOfARun, ThatCannotBeWrittenIsAnErrorBeforeTheFirstStep) {
  const Result result = run(tiny({"--json", "--ranks", "2", "--trace", "/none/trace.json"}));
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("cannot write a trace to '/none/trace.json'"));
  EXPECT_TRUE(result.losses().empty());
}

// Over sockets, where each sends to each: rounds as `plumb estimate` counts them, exactly.
TEST(EstimateOfARun, CountsTheRoundsThatAreTaken) {
  for (const std::string strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    SCOPED_TRACE(strategy);
    const Words model = {"--layers", "2", "--heads", "2", "--width", "16", "--context", "32"};
    Words train = {"train", "--json",      "--ranks", "2",       "--strategy", strategy,       "--steps",
                   "4",     "--questions", "8",       "--batch", "8",          "--eval-every", "0"};
    Words estimate = {"estimate",  "--json", "--ranks",     "2",   "--strategy", strategy,
                      "--latency", "1ms",    "--bandwidth", "1.0", "--backend",  "tcp"};
    train.insert(train.end(), model.begin(), model.end());
    estimate.insert(estimate.end(), model.begin(), model.end());
    const Result trained = run(train, kApart);
    ASSERT_EQ(trained.code, 0) << trained.err;
    const auto wire = trained.last().at("wire");
    const Result told = run(estimate);
    ASSERT_EQ(told.code, 0) << told.err;
    const auto rounds = told.last().at("estimates")[0].at("time").at("rounds");
    EXPECT_EQ(wire.at("data").at("rounds"), rounds.at("data"));
    EXPECT_EQ(wire.at("control").at("rounds"), rounds.at("control"));
  }
  // What is not told costs nothing, and that is told; a value that is wrong, before anything else is.
  EXPECT_THAT(run({"estimate", "--latency", "1ms"}).out, HasSubstr("--bandwidth and --flops: not given, so"));
  const Result odd = run({"estimate", "--latency", "1h"});
  EXPECT_EQ(odd.code, 2);
  EXPECT_EQ(odd.out, "");
  const Result unknown = run({"estimate", "--latency", "1ms", "--backend", "pigeons"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("--backend 'pigeons' is unknown; it is one of: tcp, nccl, gloo, local"));
}

}  // namespace

}  // namespace plumb::test

// Whole runs of the program: the same numbers on any number of ranks, and what a run leaves behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void expect_same_curve(const Result& a, const Result& b) {
  ASSERT_EQ(a.code, 0) << a.err;
  ASSERT_EQ(b.code, 0) << b.err;
  const auto x = a.losses(), y = b.losses();
  ASSERT_EQ(x.size(), y.size());
  ASSERT_FALSE(x.empty());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-5 * std::abs(x[i])) << "step " << i + 1;
}

Words json(const Words& more) {
  Words words = tiny({"--json"});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(Train, LosesTheSameOnOneTwoAndFourRanks) {
  const auto on = [&](const std::string& ranks) { return run(json({"--steps", "25", "--ranks", ranks})); };
  const Result one = on("1"), two = on("2"), four = on("4");
  expect_same_curve(one, two);
  expect_same_curve(one, four);
  EXPECT_LT(one.losses().back(), one.losses().front());
  EXPECT_EQ(two.last()["ranks"], 2);
  EXPECT_EQ(four.last()["peak_rss_bytes"].size(), 4u);
}

TEST(Train, LosesTheSameWhenRanksAreThreads) {
  const Result one = run(json({"--ranks", "1"}));
  const Result two = run(json({"--ranks", "2", "--backend", "local"}));
  expect_same_curve(one, two);
  EXPECT_EQ(two.last()["backend"], "local");
}

TEST(Train, LosesTheSameWithMicroBatches) {
  expect_same_curve(run(json({"--ranks", "1"})), run(json({"--ranks", "2", "--accumulate", "2"})));
}

TEST(Train, IsAFunctionOfItsSeed) {
  const auto digest = [](const std::string& seed) {
    return run(json({"--seed", seed, "--backend", "local", "--ranks", "2"})).last()["model_digest"];
  };
  EXPECT_EQ(digest("5"), digest("5"));
  EXPECT_NE(digest("5"), digest("6"));
}

TEST(Train, EndsItsJsonWithTheSummary) {
  const Result result = run(json({"--ranks", "2"}));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.lines().size(), 7u);
  const auto last = result.last();
  EXPECT_EQ(last["steps"], 6);
  EXPECT_EQ(last["ranks"], 2);
  EXPECT_EQ(last["strategy"], "ddp");
  EXPECT_EQ(last["backend"], "shm");
  EXPECT_EQ(last["dtype"], "f32");
  EXPECT_DOUBLE_EQ(last["loss"], result.losses().back());
  EXPECT_EQ(last["model_digest"].get<std::string>().size(), 32u);
  EXPECT_GT(last["step_ms_median"], 0.0);
  EXPECT_GT(last["tokens_per_s"], 0.0);
  EXPECT_GT(last["params"], 0);
  EXPECT_EQ(last["peak_rss_bytes"].size(), 2u);
  EXPECT_GT(last["peak_rss_bytes"][1], 1 << 20);
  EXPECT_EQ(last["asked"], 1024);
  EXPECT_FALSE(last["samples"].empty());
}

TEST(Train, SpeaksPlainLinesIntoAPipe) {
  const Result result = run(tiny({"--ranks", "2"}));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("step 6/6  loss "));
  EXPECT_THAT(result.out, HasSubstr(" tokens/s"));
  EXPECT_THAT(result.out, HasSubstr("held-out sums"));
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(result.out, Not(HasSubstr("\r")));
  EXPECT_THAT(run(tiny({"--quiet"})).out, Not(HasSubstr("step 6/6")));
}

TEST(Train, LeavesALogAndAReportThatLoadsNothing) {
  const Scratch scratch;
  const Result result = run(tiny({"--ranks", "2", "--json", "--out", scratch.path("a/run")}));
  ASSERT_EQ(result.code, 0) << result.err;
  const auto read = [&](const std::string& name) {
    std::ifstream file(scratch.path(name));
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  };
  EXPECT_EQ(read("a/run/log.jsonl"), result.out);
  const std::string page = read("a/run/report.html");
  EXPECT_THAT(page, HasSubstr(result.last()["model_digest"].get<std::string>()));
  EXPECT_THAT(page, Not(HasSubstr("@DATA@")));
  for (const char* link : {"src=", "href=", "@import", "url(http"}) EXPECT_THAT(page, Not(HasSubstr(link)));
  EXPECT_FALSE(scratch.has("a/run/report.html.part"));
}

TEST(Train, LearnsTheBytesOfAFile) {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 60; ++i) text += "the quick brown fox jumps over the lazy dog. </script>\n";
  const std::string file = scratch.write("fox.txt", text + "\xff\xfe");
  const Words words = json({"--data", file, "--steps", "30", "--lr", "0.01", "--out", scratch.path("run")});
  const Result result = run(words);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_LT(result.losses().back(), 0.8 * result.losses().front());
  EXPECT_EQ(result.last()["held_out"], "held-out bytes");
  // The same model is asked the same questions, however many ranks share them.
  Words alike = words;
  alike.insert(alike.end(), {"--deterministic", "--virtual-ranks", "4", "--questions", "16"});
  std::vector<Result> results;
  for (const char* ranks : {"1", "2"}) {
    alike.insert(alike.end(), {"--ranks", ranks});
    results.push_back(run(alike));
    EXPECT_EQ(results.back().last()["model_digest"], results[0].last()["model_digest"]);
    EXPECT_EQ(results.back().last()["asked"], results[0].last()["asked"]);
    EXPECT_EQ(results.back().last()["accuracy"], results[0].last()["accuracy"]);
  }
  EXPECT_GT(results[0].last()["accuracy"], 0);
}

TEST(Train, TakesSettingsFromAFileAndFlagsWin) {
  const Scratch scratch;
  const std::string file = scratch.write(
      "run.toml",
      "layers = 1\nheads = 2\nwidth = 16\nbatch = 8\nsteps = 9\nlr = 1\nthreads = 1\njson = true\nranks = 2\n"
      "backend = \"local\"\n");
  const Result result = run({"train", "--steps", "3", "--lr", "0.5", "--config", file});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last()["steps"], 3);
  EXPECT_EQ(result.last()["ranks"], 2);
  EXPECT_EQ(result.last()["settings"]["width"], 16);
  EXPECT_EQ(result.last()["settings"]["lr"], 0.5);
}

// A graph that missed an input, a micro-batch, the clearing of gradients or the learning rate of a step would learn something
// else.
TEST(Train, AGraphLearnsTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const Words& more :
       {Words{}, Words{"--accumulate", "2", "--strategy", "zero3"}, Words{"--dtype", "bf16", "--recompute"}}) {
    Words words = json({"--device", "cuda", "--steps", "12", "--warmup", "6", "--eval-every", "5"});
    words.insert(words.end(), more.begin(), more.end());
    const Result plain = run(words);
    words.push_back("--graph");
    const Result graph = run(words);
    ASSERT_EQ(plain.code, 0) << plain.err;
    ASSERT_EQ(graph.code, 0) << graph.err;
    EXPECT_EQ(plain.losses(), graph.losses());
    EXPECT_EQ(plain.last()["model_digest"], graph.last()["model_digest"]);
  }
  for (const Words& wrong :
       {Words{"--dtype", "f16"}, Words{"--deterministic"}, Words{"--verify", "2"}, Words{"--model", "moe"}}) {
    Words words = json({"--device", "cuda", "--graph"});
    words.insert(words.end(), wrong.begin(), wrong.end());
    const Result result = run(words);
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_THAT(result.err, HasSubstr("--graph does not go with " + wrong[0]));
  }
}

TEST(Train, RunsInFloat16WithALossScale) {
  for (const char* strategy : {"ddp", "zero3"}) {
    const Result result =
        run(json({"--dtype", "f16", "--ranks", "2", "--steps", "30", "--lr", "0.01", "--strategy", strategy}));
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.last()["dtype"], "f16");
    EXPECT_LT(result.losses().back(), 0.9 * result.losses().front()) << strategy;
  }
}

TEST(Train, RunsInBfloat16) {
  const Result result = run(json({"--dtype", "bf16", "--ranks", "2", "--steps", "20", "--lr", "0.01"}));
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last()["dtype"], "bf16");
  EXPECT_LT(result.losses().back(), result.losses().front());
}

}  // namespace

}  // namespace plumb::test

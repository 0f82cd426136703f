// What a failing run leaves behind for people: where a NaN began, the step that failed, the rank that computes wrong numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cli/held.h"
#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A rate at which the parameters leave f32 with the first update.
Words bursting(const Words& more) {
  Words words = tiny({"--json", "--steps", "5", "--lr", "1e30", "--warmup", "0", "--clip", "0", "--questions", "8"});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(NonFiniteRun, EndsOrSkipsAsItIsTold) {
  const Result ends = run(bursting({"--ranks", "2", "--nonfinite", "error"}));
  EXPECT_EQ(ends.code, 1);
  EXPECT_THAT(ends.err, HasSubstr("step 1: the loss of micro-batch 0 on rank 0 is not finite"));
  const Result skips = run(bursting({"--ranks", "2", "--nonfinite", "skip"}));
  EXPECT_EQ(skips.code, 0) << skips.err;
  const auto lines = skips.lines();
  ASSERT_EQ(lines.size(), 6u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(nlohmann::json::parse(lines[i]).value("skipped", false), i > 0) << lines[i];
  }
}

TEST(NonFiniteRun, IsTracedToTheOperationThatBeganIt) {
  for (const std::string strategy : {"ddp", "zero3"}) {
    const Result result =
        run(bursting({"--ranks", "2", "--strategy", strategy, "--nonfinite", "error", "--trace-nonfinite"}));
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, AllOf(HasSubstr("it began on rank 0 in micro-batch 0: aten::"),
                                  HasSubstr("native_layer_norm made NaN"), HasSubstr("in the forward")));
    EXPECT_THAT(result.err, Not(HasSubstr("empty")));
  }
  EXPECT_EQ(run(tiny({"--trace-nonfinite"})).code, 2);
}

TEST(Record, AFailingStepShowsTheSameFailureInOneProcess) {
  for (const std::string strategy : {"ddp", "zero3"}) {
    const Scratch scratch;
    const std::string folder = scratch.path("record");
    const Result failed = run(bursting(
        {"--ranks", "2", "--strategy", strategy, "--accumulate", "2", "--nonfinite", "error", "--record", folder}));
    EXPECT_EQ(failed.code, 1);
    const Result again = run({"replay", folder});
    EXPECT_EQ(again.code, 0) << again.out << again.err;
    EXPECT_THAT(again.out,
                AllOf(HasSubstr("replay of step 1 of"), HasSubstr("(2 ranks, " + strategy + ")"),
                      HasSubstr("here:     plumb: rank 0: step 1: the loss of micro-batch 0 on rank 0 is not finite"),
                      HasSubstr("first:    rank 0, micro-batch 0: aten::"), HasSubstr("\nthe same failure")));
    // Deterministic: the same words, every time.
    if (strategy == "zero3") {
      EXPECT_EQ(run({"replay", folder}).out, again.out);
    }
  }
}

TEST(Record, HoldsAsManyStepsAsFitIntoItsMemoryAndTheLastOneAlways) {
  constexpr int64_t mib = 1 << 20;
  const auto held = [](std::vector<int64_t> bytes) { return cli::steps_held(bytes); };
  EXPECT_EQ(held({}), 0u);
  EXPECT_EQ(held({1, 1}), 2u);
  EXPECT_EQ(held({1, 1, 1, 1}), 3u);
  EXPECT_EQ(held({mib, 128 * mib, 128 * mib}), 2u);
  EXPECT_EQ(held({1, 128 * mib, 128 * mib - 1}), 3u);
  EXPECT_EQ(held({1, 1, 256 * mib}), 1u);
  EXPECT_EQ(held({1, 300 * mib}), 1u) << "the last one always";
  EXPECT_EQ(held({1, 300 * mib, 1}), 1u) << "no step is left out between two";
}

TEST(Record, HoldsTheStateOfTheStepThatFailed) {
  const Scratch scratch;
  const std::string folder = scratch.path("record"), saved = scratch.path("saved");
  const Words words = tiny({"--json", "--ranks", "2", "--strategy", "zero2", "--deterministic", "--virtual-ranks", "4",
                            "--steps", "12", "--questions", "8"});
  const auto with = [&](const Words& more) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Result failed = run(with({"--record", folder}), {{"PLUMB_FAULT", "rank=1,point=hook:150,kind=throw"}});
  ASSERT_EQ(failed.code, 1) << failed.err;
  std::string there;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) there = entry.path().string();
  // What was asked for here does not happen there, and the step goes well.
  const Result again = run({"replay", folder});
  EXPECT_EQ(again.code, 1) << again.out << again.err;
  EXPECT_THAT(again.out, HasSubstr("not the same failure"));
  // With the loss of the undisturbed run: the inputs are those of that step, of every rank.
  std::ifstream file(there + "/record-00000.json");
  const auto record = nlohmann::json::parse(file);
  EXPECT_EQ(record["steps"].size(), 3u) << "the last few";
  const size_t step = record["step"];
  ASSERT_GE(step, 3u);
  const Result undisturbed = run(with({"--checkpoint", saved, "--save-every", "1", "--keep", "0"}));
  const double loss = undisturbed.losses().at(step);
  const size_t said = again.out.find("here:     the step goes well, with a loss of ");
  ASSERT_NE(said, std::string::npos) << again.out;
  EXPECT_NEAR(std::stod(again.out.substr(said + 45)), loss, 1e-12);
  // The state in the record is what the checkpoint of that step holds.
  std::string same;
  for (const auto& entry : std::filesystem::directory_iterator(saved)) {
    if (entry.path().string().ends_with("-step-" + std::to_string(step))) same = entry.path().string();
  }
  EXPECT_EQ(run({"checkpoint", "verify", there}).code, 0);
  const Result compared = run({"checkpoint", "diff", same, there});
  EXPECT_THAT(compared.out, AllOf(HasSubstr("generator"), Not(HasSubstr("weight")), Not(HasSubstr("optimizer"))))
      << "two runs begin with random numbers of their own, and share all else";
  // A rank's part that is missing is named.
  std::filesystem::remove(there + "/record-00001.json");
  EXPECT_THAT(run({"replay", there}).err, HasSubstr("record-00001.json' is missing: rank 1 was killed"));
  // An update that was under way has no state to go back to.
  const std::string updating = scratch.path("updating");
  run(with({"--record", updating}), {{"PLUMB_FAULT", "rank=1,point=update:3,kind=throw"}});
  EXPECT_THAT(run({"replay", updating}).err, HasSubstr("recorded no state: the parameters were being updated"));
  const std::string publishing = scratch.path("publishing");
  run(with({"--record", publishing}), {{"PLUMB_FAULT", "rank=1,point=publish:3,kind=throw"}});
  EXPECT_THAT(run({"replay", publishing}).err, HasSubstr("recorded no state: the parameters were being updated"));
  EXPECT_THAT(run({"replay", scratch.path("nowhere")}).err, HasSubstr("no record of a failure"));
  EXPECT_EQ(run({"replay"}).code, 2);
}

// A run that is started again, and fails at the same step again, leaves both.
TEST(Record, OfEveryLifeOfARunIsKept) {
  const Scratch scratch;
  const Result result = run(tiny({"--json", "--ranks", "2", "--questions", "8", "--restarts", "1", "--checkpoint",
                                  scratch.path("saved"), "--record", scratch.path("record")}),
                            {{"PLUMB_FAULT", "rank=1,point=step:3,kind=throw;rank=0,point=step:3,kind=throw"}});
  EXPECT_NE(result.code, 0);
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path("record"))) {
    found.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(found, ::testing::UnorderedElementsAre("step-00002-restart-00000", "step-00002-restart-00001"));
}

// Whatever it is called: a later run may fail at an earlier step.
TEST(Record, OfSeveralFailuresIsThatOfTheLast) {
  const Scratch scratch;
  const auto write = [&](const std::string& name, int hours_ago) {
    const std::string folder = scratch.path(name);
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/record-00000.json") << "{}";
    std::filesystem::last_write_time(folder,
                                     std::filesystem::file_time_type::clock::now() - std::chrono::hours(hours_ago));
  };
  write("step-00009-restart-00000", 3);
  write("step-00004-restart-00000", 1);
  write("step-00002-restart-00001", 2);
  EXPECT_THAT(run({"replay", scratch.path(".")}).err, HasSubstr("/step-00004-restart-00000/record-00000.json' cannot"))
      << "which is none, and says so";
}

Words steady(const Words& more) {
  Words words = tiny({"--json", "--deterministic", "--virtual-ranks", "4", "--steps", "6", "--questions", "8"});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(Verify, ChangesNothing) {
  const std::string undisturbed = run(steady({"--ranks", "1"})).last()["model_digest"];
  for (const std::string strategy : {"zero1", "zero3"}) {
    const Result result = run(steady({"--ranks", "2", "--strategy", strategy, "--verify", "2"}));
    ASSERT_EQ(result.code, 0) << strategy << ": " << result.err;
    EXPECT_EQ(result.last()["model_digest"], undisturbed) << strategy;
  }
}

TEST(Verify, NamesTheRankThatContributesWrongNumbers) {
  for (const std::string strategy : {"ddp", "zero3"}) {
    const Result result = run(steady({"--ranks", "2", "--strategy", strategy, "--verify", "1"}),
                              {{"PLUMB_FAULT", "rank=1,point=hook:1,kind=flip"}});
    EXPECT_EQ(result.code, 1) << strategy;
    EXPECT_THAT(result.err, AllOf(HasSubstr("step 0: rank 1 computes wrong numbers: the gradient of '"),
                                  HasSubstr("that rank 1 contributed for micro-batch 0")));
  }
}

TEST(Verify, NamesTheRankWhoseStateDiffers) {
  // Found at the next look; among four, three are right.
  const Result result =
      run(steady({"--ranks", "4", "--verify", "3"}), {{"PLUMB_FAULT", "rank=2,point=publish:1,kind=flip"}});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("step 2: "), HasSubstr("is not the same on every rank: rank 2 holds other bits")));
  // A shard has replicas, too; of two that differ nobody knows which is right.
  const Result sharded = run(steady({"--ranks", "4", "--strategy", "hsdp", "--verify", "3"}),
                             {{"PLUMB_FAULT", "rank=2,point=publish:1,kind=flip"}});
  EXPECT_EQ(sharded.code, 1);
  EXPECT_THAT(sharded.err, AllOf(HasSubstr("step 2: "), HasSubstr("is not the same on every rank")));
}

}  // namespace

}  // namespace plumb::test

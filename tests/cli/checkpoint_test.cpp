// Runs that end and go on: killed, stopped, on other numbers of ranks; and `plumb checkpoint`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::HasSubstr;

Words steady(const Words& more) {
  Words words = tiny({"--json", "--deterministic", "--virtual-ranks", "4", "--steps", "40", "--questions", "8"});
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::string digest_of(const Result& result) {
  EXPECT_EQ(result.code, 0) << result.err;
  return result.last()["model_digest"];
}

size_t saved_in(const std::string& folder) {
  size_t count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    count += entry.path().filename().string().starts_with("save-") ? 1 : 0;
  }
  return count;
}

TEST(Checkpoint, FourRanksOfZero3AreKilledAndTwoOfDdpEndWithTheSameBits) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved"), undisturbed = digest_of(run(steady({"--ranks", "1"})));
  {
    Program program(steady({"--ranks", "4", "--strategy", "zero3", "--checkpoint", folder, "--save-every", "3"}));
    program.wait_for_lines(14);
    const auto ranks = program.children();
    ASSERT_EQ(ranks.size(), 4u);
    kill(ranks[2], SIGKILL);
    const Result result = program.wait();
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, HasSubstr("rank 2 was ended by signal 9"));
  }
  ASSERT_GE(saved_in(folder), 1u);
  const Result result = run(steady({"--ranks", "2", "--strategy", "ddp", "--checkpoint", folder}));
  EXPECT_EQ(digest_of(result), undisturbed);
  EXPECT_GT(result.last()["resumed_from_step"], 0);
  EXPECT_EQ(result.last()["samples_used"], 40 * result.last()["settings"]["batch"].get<int64_t>());
  // It is complete: once more, there is nothing to do, and the model is the same.
  EXPECT_EQ(digest_of(run(steady({"--ranks", "1", "--checkpoint", folder}))), undisturbed);
}

TEST(Checkpoint, AKilledRankIsRestartedWithFewerRanks) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved"), undisturbed = digest_of(run(steady({"--ranks", "2"})));
  Program program(steady({"--ranks", "4", "--strategy", "zero2", "--checkpoint", folder, "--save-every", "3",
                          "--restarts", "2", "--min-ranks", "1"}));
  program.wait_for_lines(12);
  const auto ranks = program.children();
  ASSERT_EQ(ranks.size(), 4u);
  kill(ranks[1], SIGKILL);
  const Result result = program.wait();
  EXPECT_EQ(digest_of(result), undisturbed);
  EXPECT_EQ(result.last()["ranks"], 2);  // three ranks cannot share four shares
  EXPECT_THAT(result.err, HasSubstr("restart 1 of 2, on 2 ranks"));
}

TEST(Checkpoint, ARunThatWasStoppedGoesOn) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved"), undisturbed = digest_of(run(steady({"--ranks", "1"})));
  {
    Program program(steady({"--ranks", "2", "--checkpoint", folder}));
    program.wait_for_lines(5);
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait().code, 128 + SIGTERM);
  }
  EXPECT_EQ(saved_in(folder), 1u);
  EXPECT_EQ(digest_of(run(steady({"--ranks", "1", "--checkpoint", folder}))), undisturbed);
  // And from the beginning, when it is asked to.
  const Result fresh = run(steady({"--ranks", "1", "--checkpoint", folder, "--resume", "never"}));
  EXPECT_EQ(fresh.last()["resumed_from_step"], 0);
  EXPECT_EQ(digest_of(fresh), undisturbed);
}

TEST(Checkpoint, TrainingGoesOnWhereTheDiskDoesNot) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved");
  std::filesystem::create_directory(folder);
  // Somebody else's lock: every save fails.
  const Result result = shell("exec 9>\"$1/.lock\"; flock -n 9 || exit 9; shift; \"$PLUMB\" \"$@\"", [&] {
    Words words = {folder};
    for (const auto& word : steady({"--ranks", "2", "--checkpoint", folder, "--save-every", "20"}))
      words.push_back(word);
    return words;
  }());
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("another run writes checkpoints"));
  EXPECT_THAT(result.err, HasSubstr("training goes on"));
  EXPECT_EQ(saved_in(folder), 0u);
}

// A real one: a file system of its own, with room for a few checkpoints.
TEST(Checkpoint, AFullDiskCostsNothingButTheCheckpointsThatDoNotFit) {
  const Scratch scratch;
  const std::string folder = scratch.path("disk");
  std::filesystem::create_directory(folder);
  Words words = {folder};
  for (const auto& word : steady({"--ranks", "2", "--strategy", "zero3", "--save-every", "4", "--keep", "0",
                                  "--checkpoint", folder + "/saved"})) {
    words.push_back(word);
  }
  const Result result = shell(R"(for how in -rm -m; do unshare $how true 2>/dev/null && break; how=; done
    test -n "$how" || exit 77
    exec unshare $how sh -c 'folder=$1; shift
      mount -t tmpfs -o size=500k full "$folder" 2>/dev/null || exit 77
      "$PLUMB" "$@" || exit $?
      ls -A "$folder/saved" >&2
      "$PLUMB" checkpoint verify "$folder"/saved/save-* >&2' sh "$@")",
                              words);
  if (result.code == 77) GTEST_SKIP() << "this machine does not allow `unshare -m` and mounts";
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("No space left on device; training goes on, earlier checkpoints are intact"));
  EXPECT_THAT(result.err, HasSubstr("save-00000001-step-4"));
  EXPECT_THAT(result.err, HasSubstr("all as they were saved"));
  EXPECT_THAT(result.err, testing::Not(HasSubstr("\n.unfinished-")));
}

TEST(Checkpoint, TheToolLooksComparesAndConverts) {
  const Scratch scratch;
  const std::string a = scratch.path("a"), b = scratch.path("b");
  const Words few = {"--steps", "4", "--save-every", "2", "--keep", "0"};
  const auto with = [&](Words words) {
    words.insert(words.end(), few.begin(), few.end());
    return run(steady(words));
  };
  digest_of(with({"--ranks", "2", "--strategy", "zero3", "--checkpoint", a}));
  digest_of(with({"--ranks", "1", "--checkpoint", b}));
  const Result list = run({"checkpoint", "list", a});
  EXPECT_EQ(list.lines().size(), 2u);
  EXPECT_THAT(list.out, HasSubstr("step 4"));
  EXPECT_THAT(list.out, HasSubstr("by 2 ranks (\"zero3\")"));
  EXPECT_THAT(run({"checkpoint", "inspect", a}).out, HasSubstr("weight '"));
  EXPECT_THAT(run({"checkpoint", "verify", a, b}).out, HasSubstr("all as they were saved"));
  const std::string first = list.lines()[0].substr(0, list.lines()[0].find("  "));
  const Result differs = run({"checkpoint", "diff", a, first});
  EXPECT_EQ(differs.code, 1);
  EXPECT_THAT(differs.out, HasSubstr("the step: 4 and 2"));
  const Result reshard = run({"checkpoint", "reshard", a, scratch.path("c"), "--ranks", "3"});
  EXPECT_EQ(reshard.code, 0) << reshard.err;
  EXPECT_EQ(run({"checkpoint", "diff", a, scratch.path("c")}).code, 0);
  EXPECT_EQ(run({"checkpoint", "consolidate", a, scratch.path("model.safetensors")}).code, 0);
  EXPECT_TRUE(scratch.has("model.safetensors"));
  // A flipped bit is found, and named.
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(first)) {
    if (entry.path().filename().string().starts_with("weights-00001")) file = entry.path().string();
  }
  std::fstream bits(file, std::ios::in | std::ios::out | std::ios::binary);
  bits.seekp(-3, std::ios::end);
  bits.put('\x55');
  bits.close();
  const Result damaged = run({"checkpoint", "verify", first});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.err, HasSubstr("was damaged: the checksum"));
  EXPECT_EQ(run({"checkpoint", "verify", scratch.path("absent")}).code, 1);
  EXPECT_EQ(run({"checkpoint", "what"}).code, 2);
}

TEST(Checkpoint, FlagsThatMakeNoSenseAreRefused) {
  EXPECT_THAT(run(tiny({"--save-every", "3"})).err, HasSubstr("--checkpoint DIR"));
  EXPECT_THAT(run(tiny({"--nonfinite", "maybe"})).err, HasSubstr("error, skip, continue"));
  EXPECT_THAT(run(tiny({"--resume", "/nowhere"})).err, HasSubstr("no complete checkpoint in '/nowhere'"));
}

}  // namespace

}  // namespace plumb::test

// Runs that end and go on: killed, stopped, on other numbers of ranks; and `plumb checkpoint`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include "libtorch.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "cli/support/program.h"
#include "plumb/plumb.h"

namespace plumb::test {

namespace {

using ::testing::ContainsRegex;
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

// Without the lost ones at once, on all of them at the next restart, whatever ended the smaller life.
TEST(Checkpoint, ARankThatWasLostIsBackAtTheNextRestart) {
  const Scratch scratch;
  const std::string undisturbed = digest_of(run(steady({"--ranks", "2"})));
  const Result result = run(steady({"--ranks", "4", "--strategy", "zero1", "--checkpoint", scratch.path("saved"),
                                    "--save-every", "3", "--restarts", "5", "--min-ranks", "2"}),
                            {{"PLUMB_FAULT",
                              "rank=1,point=update:8,kind=kill;rank=0,point=update:5,kind=kill;rank=2,point=update:5,"
                              "kind=kill;rank=1,point=update:5,kind=throw;rank=3,point=update:5,kind=throw"}});
  EXPECT_EQ(digest_of(result), undisturbed);
  EXPECT_EQ(result.last()["ranks"], 4);
  EXPECT_THAT(result.err, ContainsRegex("rank 1 was ended by signal 9[^\n]*\nplumb: restart 1 of 5, on 2 ranks"));
  EXPECT_THAT(result.err, ContainsRegex("rank 0 was ended by signal 9[^\n]*\nplumb: restart 2 of 5, on 4 ranks"));
  EXPECT_THAT(result.err, ContainsRegex("rank 2 was ended by signal 9[^\n]*\nplumb: restart 3 of 5, on 2 ranks"));
  EXPECT_THAT(result.err, ContainsRegex("an error at update:5[^\n]*\nplumb: restart 4 of 5, on 4 ranks"));
  EXPECT_THAT(result.err, ContainsRegex("an error at update:5[^\n]*\nplumb: restart 5 of 5, on 4 ranks"));
  // Where too few are left, there is no restart.
  const Result ended =
      run(steady({"--ranks", "2", "--checkpoint", scratch.path("other"), "--restarts", "1", "--min-ranks", "2"}),
          {{"PLUMB_FAULT", "rank=1,point=update:8,kind=kill"}});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("fewer than --min-ranks 2 ranks are left"));
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

// Between two steps, too: what was learned by then is saved, and no step is lost or taken again.
TEST(Checkpoint, ARunThatIsStoppedInAnEvaluationIsSavedAsItIs) {
  const Scratch scratch;
  const Words words = tiny({"--json", "--ranks", "1", "--steps", "4", "--eval-every", "1", "--questions", "8",
                            "--checkpoint", scratch.path("saved")});
  // Held where its second evaluation begins, until it has been asked to stop.
  Program program(words, {{"PLUMB_FAULT", "rank=0,point=evaluate:5,kind=stop"}});
  const auto held = [&] {
    std::string stat;
    std::getline(std::ifstream("/proc/" + std::to_string(program.pid()) + "/stat"), stat);
    return stat.find(") T ") != std::string::npos;
  };
  for (int i = 0; i < 60'000 && !held(); ++i) usleep(1'000);
  ASSERT_TRUE(held());
  program.signal(SIGTERM);
  program.signal(SIGCONT);
  const Result stopped = program.wait();
  EXPECT_EQ(stopped.code, 128 + SIGTERM) << stopped.err;
  EXPECT_EQ(stopped.last()["steps"], 2);
  EXPECT_EQ(stopped.last()["samples_used"], 16);
  const Result resumed = run(words);
  EXPECT_EQ(resumed.last()["resumed_from_step"], 2);
  EXPECT_EQ(resumed.last()["samples_used"], 32);
  // A run that takes fewer samples at a time goes on behind those that were used.
  const Result last = run(tiny({"--json", "--ranks", "1", "--steps", "8", "--questions", "8", "--batch", "16",
                                "--checkpoint", scratch.path("other")}));
  const Result more =
      run(tiny({"--json", "--ranks", "1", "--steps", "12", "--questions", "8", "--checkpoint", scratch.path("other")}));
  EXPECT_EQ(last.last()["samples_used"], 8 * 16);
  EXPECT_EQ(more.last()["samples_used"], 8 * 16 + 4 * 8);
}

TEST(Checkpoint, ARunGoesOnFromThePathThatIsGiven) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved"), undisturbed = digest_of(run(steady({"--ranks", "1"})));
  const Result first = run(steady({"--ranks", "1", "--checkpoint", folder, "--save-every", "10", "--keep", "0"}));
  EXPECT_EQ(digest_of(first), undisturbed);
  std::string one;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().string().ends_with("-step-20")) one = entry.path().string();
  }
  // One checkpoint, not the newest; and a folder, whose newest one it is. The run's own folder is another, or none.
  for (const Words& more : {Words{"--resume", one}, Words{"--resume", one, "--checkpoint", scratch.path("other")}}) {
    Words words = {"--ranks", "2", "--strategy", "zero3"};
    words.insert(words.end(), more.begin(), more.end());
    const Result result = run(steady(words));
    EXPECT_EQ(digest_of(result), undisturbed);
    EXPECT_EQ(result.last()["resumed_from_step"], 20);
  }
  EXPECT_EQ(saved_in(scratch.path("other")), 1u);
  std::filesystem::remove_all(scratch.path("other"));
  EXPECT_EQ(run(steady({"--ranks", "2", "--resume", folder})).last()["resumed_from_step"], 40);
  EXPECT_EQ(run({"checkpoint", "verify", one}).code, 0);
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
  EXPECT_THAT(result.err, HasSubstr("another run writes checkpoints"));
  EXPECT_THAT(result.err, HasSubstr("training goes on"));
  EXPECT_EQ(saved_in(folder), 0u);
  // To its end, which it tells; what it learned is saved nowhere, and nobody may take that for done.
  EXPECT_EQ(result.last()["steps"], 40);
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("the state after step 40 is saved nowhere, earlier checkpoints are intact"));
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
      "$PLUMB" "$@"; test $? = 1 || exit 9
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

// A limit on the length of a file is told as a full disk is, and ends no run.
TEST(Checkpoint, ThatIsLongerThanAFileMayBeIsGoneOnWithout) {
  const Scratch scratch;
  Words words = steady({"--steps", "4", "--ranks", "2", "--save-every", "2", "--checkpoint", scratch.path("saved")});
  const Result result = shell("ulimit -f 8; \"$PLUMB\" \"$@\"", words);
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("File too large; training goes on, earlier checkpoints are intact"));
  EXPECT_EQ(result.last()["steps"], 4);
}

// Of any shape and dtype: an element is named, and by how much it differs.
TEST(Checkpoint, TheToolComparesScalarsAndComplexNumbers) {
  const Scratch scratch;
  struct Few : torch::nn::Module {
    Few(double scalar, c10::complex<float> number) {
      register_parameter("scalar", at::full({}, scalar, at::kFloat));
      register_buffer("empty", at::zeros({0, 3}));
      register_buffer("numbers", at::full({2}, number, at::kComplexFloat));
    }
  };
  const auto saved = [&](const std::string& name, double scalar, c10::complex<float> number) {
    Few model(scalar, number);
    Engine engine(World(), model, SGD{});
    return engine.save(scratch.path(name));
  };
  const std::string a = saved("a", 1.5, {1, 2}), b = saved("b", 2, {1, 2}), c = saved("c", 1.5, {1, 4});
  EXPECT_EQ(run({"checkpoint", "diff", a, a}).code, 0);
  EXPECT_THAT(run({"checkpoint", "diff", a, b}).out,
              HasSubstr("weight 'scalar': 1 of 1 elements differ, by at most 0.5; the first is element 0: 1.5 and 2"));
  EXPECT_THAT(run({"checkpoint", "diff", a, c}).out,
              HasSubstr("buffer 'numbers': 2 of 2 elements differ, by at most 2; the first is element 0: "));
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

// A checkpoint that was damaged is not begun over beside it, as if it had never been.
TEST(Checkpoint, WhatIsDamagedIsToldAndNotBegunOver) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved");
  const auto again = [&](const Words& more) {
    Words words = {"--json", "--steps", "6", "--questions", "8", "--checkpoint", folder};
    words.insert(words.end(), more.begin(), more.end());
    return run(tiny(words));
  };
  EXPECT_EQ(again({"--steps", "2"}).code, 0);
  EXPECT_EQ(again({"--steps", "4"}).code, 0);
  const auto cut = [&](const std::string& name) {
    const std::string file = folder + "/" + name + "/manifest.json";
    ASSERT_TRUE(std::filesystem::exists(file));
    std::filesystem::resize_file(file, 100);
  };
  cut("save-00000002-step-4");
  const Result older = again({"--ranks", "2"});
  EXPECT_EQ(older.code, 0) << older.err;
  EXPECT_EQ(older.last()["resumed_from_step"], 2);
  EXPECT_THAT(older.err,
              HasSubstr("a checkpoint is passed over: the manifest of '" + folder + "/save-00000002-step-4"));
  cut("save-00000001-step-2");
  cut("save-00000003-step-6");
  const Result none = again({"--ranks", "2"});
  EXPECT_EQ(none.code, 1);
  EXPECT_THAT(none.err, HasSubstr("of the checkpoints in '" + folder + "' none is complete: the manifest of '"));
  EXPECT_THAT(none.err, HasSubstr("--resume never starts from nothing"));
  EXPECT_EQ(again({"--resume", "never"}).last()["resumed_from_step"], 0);
}

// Not by a line that ends where the table begins.
TEST(Checkpoint, WhatDoesNotFitIsToldInATable) {
  const Scratch scratch;
  const Words saved = {"--steps", "2", "--questions", "8", "--checkpoint", scratch.path("saved")};
  EXPECT_EQ(run(tiny(saved)).code, 0);
  for (const std::string ranks : {"1", "2"}) {
    Words words = saved;
    words.insert(words.end(), {"--width", "32", "--ranks", ranks});
    const Result refused = run(tiny(words));
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.err, HasSubstr("does not fit this engine, and nothing was loaded"));
    EXPECT_THAT(refused.err,
                HasSubstr("\nreshaped  weight 'blocks.0.attention_norm.bias'  saved F32 [16]  here F32 [32]\n"));
    EXPECT_THAT(refused.err, ContainsRegex("\n… and [0-9]+ more\n"));
    EXPECT_LT(std::count(refused.err.begin(), refused.err.end(), '\n'), 25);
  }
}

TEST(Checkpoint, TheRateIsTheOneThatIsGiven) {
  const Scratch scratch;
  const auto go_on = [&](const Words& more) {
    Words words = {"--json", "--questions", "8", "--warmup", "0", "--checkpoint", scratch.path("saved")};
    words.insert(words.end(), more.begin(), more.end());
    return run(tiny(words));
  };
  EXPECT_EQ(go_on({"--steps", "2"}).code, 0);
  const Result result = go_on({"--steps", "3", "--lr", "0.25"});
  EXPECT_EQ(result.last()["resumed_from_step"], 2) << result.err;
  EXPECT_GT(nlohmann::json::parse(result.lines()[0])["lr"].get<double>(), 0.01);
}

// The tool says what it passes over, and two checkpoints that go on differently are not the same.
TEST(Checkpoint, TheToolTellsOfDamageAndOfSettings) {
  const Scratch scratch;
  torch::nn::Linear model(2, 2);
  Engine engine(World(), *model, SGD{.lr = 0.5});
  const std::string folder = scratch.path("a"), first = engine.save(folder);
  engine.set_lr(0.25);
  const std::string second = engine.save(folder);
  const Result differs = run({"checkpoint", "diff", first, second});
  EXPECT_EQ(differs.code, 1);
  EXPECT_THAT(differs.out, HasSubstr("setting 'lr': 0.5 and 0.25"));
  std::filesystem::resize_file(second + "/manifest.json", 100);
  const Result verified = run({"checkpoint", "verify", folder});
  EXPECT_EQ(verified.code, 1);
  EXPECT_THAT(verified.err, HasSubstr("a newer checkpoint than '" + first + "' is passed over: the manifest of '"));
  EXPECT_THAT(verified.out, HasSubstr("all as they were saved"));
  const Result inspected = run({"checkpoint", "inspect", folder});
  EXPECT_EQ(inspected.code, 0);
  EXPECT_THAT(inspected.err, HasSubstr("is passed over"));
}

// The tool takes the place of a plain file alone, and leaves nothing of what failed.
TEST(Checkpoint, TheToolWritesPlainFilesAlone) {
  const Scratch scratch;
  const std::string a = scratch.path("a"), model = scratch.path("model.safetensors"), link = scratch.path("link");
  EXPECT_EQ(run(tiny({"--steps", "2", "--questions", "8", "--checkpoint", a})).code, 0);
  const std::string pipe = scratch.path("pipe"), sub = scratch.path("sub");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::filesystem::create_directory(sub);
  for (const std::string& target : {pipe, sub, std::string()}) {
    const Result refused = run({"checkpoint", "consolidate", a, target});
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.err, HasSubstr("'" + target + "' is no plain file; name one"));
  }
  std::string one;
  for (const auto& entry : std::filesystem::directory_iterator(a)) {
    if (entry.path().filename().string().starts_with("save-")) one = entry.path().string();
  }
  for (const char* inside : {"manifest.json", "new.safetensors"}) {
    const Result refused = run({"checkpoint", "consolidate", a, one + "/" + inside});
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.err, HasSubstr("would lie inside of a checkpoint"));
  }
  EXPECT_EQ(run({"checkpoint", "verify", one}).code, 0);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_FALSE(scratch.has("pipe.unfinished") || scratch.has("sub.unfinished"));
  scratch.write("model.safetensors", "old");
  std::filesystem::create_symlink(model, link);
  EXPECT_EQ(run({"checkpoint", "consolidate", a, link}).code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_GT(std::filesystem::file_size(model), 100u);
  // The number of ranks may stand anywhere.
  const std::string b = scratch.path("b");
  EXPECT_EQ(run({"checkpoint", "reshard", "--ranks", "2", a, b}).code, 0);
  EXPECT_EQ(run({"checkpoint", "reshard", a, b, "--ranks=3"}).code, 0);
  EXPECT_EQ(run({"checkpoint", "diff", a, b}).code, 0);
  EXPECT_THAT(run({"checkpoint", "reshard", a, b}).err, HasSubstr("takes a checkpoint, a folder and --ranks N"));
  EXPECT_THAT(run({"checkpoint", "reshard", a, b, "--ranks", "0"}).err, HasSubstr("--ranks '0': expected a number"));
}

TEST(Checkpoint, AListOfNothingSaysSo) {
  const Scratch scratch;
  ASSERT_EQ(run(tiny({"--steps", "1", "--checkpoint", scratch.path("saved")})).code, 0);
  const Result itself = run({"checkpoint", "list", scratch.path("saved/save-00000001-step-1")});
  EXPECT_EQ(itself.code, 1);
  EXPECT_THAT(itself.err, HasSubstr("is a checkpoint itself, which `inspect` shows; name the folder that it lies in"));
  std::filesystem::create_directory(scratch.path("empty"));
  const Result nothing = run({"checkpoint", "list", scratch.path("empty")});
  EXPECT_EQ(nothing.code, 0);
  EXPECT_EQ(nothing.out, "");
  EXPECT_THAT(nothing.err, HasSubstr("there are no checkpoints in '" + scratch.path("empty") + "'"));
}

TEST(Checkpoint, FlagsThatMakeNoSenseAreRefused) {
  EXPECT_THAT(run(tiny({"--save-every", "3"})).err, HasSubstr("--checkpoint DIR"));
  const auto restarted = [](const Words& more) {
    Words words = {"--restarts", "1", "--checkpoint", "/none/saved"};
    words.insert(words.end(), more.begin(), more.end());
    return run(tiny(words)).err;
  };
  EXPECT_THAT(restarted({"--ranks", "2", "--min-ranks", "3"}), HasSubstr("--min-ranks 3 is more than --ranks 2"));
  EXPECT_THAT(restarted({"--backend", "local"}), HasSubstr("--backend local makes ranks threads"));
  EXPECT_THAT(run(tiny({"--nonfinite", "maybe"})).err, HasSubstr("error, skip, continue"));
  EXPECT_THAT(run(tiny({"--resume", "/nowhere"})).err, HasSubstr("--resume '/nowhere' does not exist"));
}

}  // namespace

}  // namespace plumb::test

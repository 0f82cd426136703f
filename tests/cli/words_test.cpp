// What the program says to right and wrong words, before it trains anything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <limits>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// One line on stderr that says `text`, nothing on stdout, exit code 2.
void expect_usage_error(const Words& words, const Words& text) {
  const Result result = run(words);
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, StartsWith("plumb: "));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  for (const auto& part : text) EXPECT_THAT(result.err, HasSubstr(part));
}

TEST(Words, HelpFitsAScreen) {
  const Result result = run({"--help"});
  EXPECT_EQ(result.code, 0);
  EXPECT_LE(result.lines().size(), 24u);
  for (const auto& line : result.lines()) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_THAT(result.out, AllOf(HasSubstr("plumb train"), HasSubstr("plumb info"), HasSubstr("plumb estimate")));
}

TEST(Words, TrainHelpNamesEveryFlag) {
  const Result result = run({"train", "--help"});
  EXPECT_EQ(result.code, 0);
  for (const char* flag :
       {"--ranks",   "--strategy",     "--model", "--layers",        "--heads",         "--width",
        "--context", "--steps",        "--batch", "--accumulate",    "--dtype",         "--lr",
        "--warmup",  "--weight-decay", "--clip",  "--seed",          "--device",        "--backend",
        "--timeout", "--bucket-mb",    "--data",  "--out",           "--config",        "--json",
        "--threads", "--quiet",        "--mesh",  "--deterministic", "--virtual-ranks", "--hold-unsharded"}) {
    EXPECT_THAT(result.out, HasSubstr(flag));
  }
}

TEST(Words, VersionIsOneLine) {
  const Result result = run({"--version"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, StartsWith("plumb "));
  EXPECT_EQ(result.lines().size(), 1u);
}

TEST(Words, InfoSpeaksJson) {
  const auto info = run({"info", "--json"}).last();
  for (const char* key : {"plumb", "torch", "devices", "backends", "strategies"})
    EXPECT_TRUE(info.contains(key)) << key;
  EXPECT_THAT(run({"info"}).out, AllOf(HasSubstr("torch"), HasSubstr("gloo")));
}

TEST(Words, WrongFlagsAndValuesAreOneClearLine) {
  expect_usage_error({"fly"}, {"'fly'", "train, estimate, sim, info"});
  expect_usage_error({"info", "--loud"}, {"--loud"});
  expect_usage_error({"train", "--loud"}, {"--loud"});
  expect_usage_error({"train", "loud"}, {"loud"});
  expect_usage_error({"train", "--steps", "many"}, {"--steps", "whole number", "'many'"});
  expect_usage_error({"train", "--steps", "1.5"}, {"--steps", "whole number"});
  expect_usage_error({"train", "--steps"}, {"--steps", "needs a value"});
  expect_usage_error({"train", "--out=", "--steps", "1"}, {"--out needs a value"});
  expect_usage_error({"train", "--steps", "0"}, {"--steps", "at least 1"});
  expect_usage_error({"train", "--steps", "99999999999999999999"}, {"--steps"});
  expect_usage_error({"train", "--lr", "nan"}, {"--lr"});
  expect_usage_error({"train", "--lr", "-1"}, {"--lr"});
  expect_usage_error({"train", "--dtype", "f8"}, {"--dtype", "'f8'", "f32, bf16, f16"});
  expect_usage_error({"train", "--device", "tpu"}, {"--device", "'tpu'", "cpu, cuda"});
  expect_usage_error({"train", "--backend", "pigeon"}, {"--backend", "'pigeon'", "shm, tcp, gloo, nccl, local"});
  expect_usage_error({"train", "--backend", "nccl"}, {"--backend nccl", "--device cuda"});
  expect_usage_error({"train", "--graph"}, {"--graph", "--device cpu", "only cuda has graphs"});
  expect_usage_error({"train", "--model", "rnn"}, {"--model", "'rnn'", "gpt"});
  expect_usage_error({"train", "--timeout", "0"}, {"--timeout", "more than 0"});
  expect_usage_error({"train", "--width", "10", "--heads", "3"}, {"--width 10", "--heads 3"});
  expect_usage_error({"train", "--context", "4"}, {"--context 4", "11"});
}

TEST(Words, NumbersThatNobodyMeansAreTooLarge) {
  const std::string huge = "9223372036854775807";
  for (const char* flag : {"accumulate", "batch", "questions", "steps", "eval-every", "heads"}) {
    expect_usage_error({"train", std::string("--") + flag, huge}, {std::string("--") + flag, huge, "at most"});
  }
  expect_usage_error({"estimate", "--accumulate", huge}, {"--accumulate", "at most"});
  expect_usage_error({"estimate", "--units", "1000000000"}, {"--units", "at most"});
  expect_usage_error({"estimate", "--params", "1000000B", "--accumulate", "1000"}, {"--accumulate 1000", "smaller"});
  const Scratch scratch;
  expect_usage_error({"train", "--config", scratch.write("huge.toml", "batch = " + huge + "\n")}, {"batch", "at most"});
}

TEST(Words, ErrorsStayOneLineWhateverTheyRepeat) {
  expect_usage_error({"train", "--strategy", "x\ny"}, {"--strategy 'x\\ny' is unknown", "zero3"});
  expect_usage_error({"train", "--data", "no\nsuch\x1b.txt"}, {"'no\\nsuch\\x1b.txt' does not exist"});
  expect_usage_error({"train", "--steps", std::string(5000, '7')}, {"'" + std::string(80, '7') + "…'"});
  expect_usage_error({"fly\tnow"}, {"'fly\\tnow'", "train, estimate"});
}

TEST(Words, AnUnknownStrategyIsToldTheNames) {
  expect_usage_error({"train", "--strategy", "zero9"}, {"--strategy", "'zero9'", "ddp"});
}

TEST(Words, AMeshMustBeUnderstoodAndMultiplyToTheWorld) {
  const auto mesh = [](const std::string& text, const std::string& ranks) {
    return Words{"train", "--strategy", "hsdp", "--ranks", ranks, "--mesh", text};
  };
  expect_usage_error(mesh("replicate=2,shard=2", "2"), {"--mesh", "replicate=2, shard=2", "2 ranks"});
  expect_usage_error(mesh("shard=3", "4"), {"--mesh", "the mesh shard=3 does not divide", "4 ranks"});
  expect_usage_error(mesh("2x2", "4"), {"--mesh '2x2'", "'2x2' is no axis", "replicate=2,shard=2"});
  expect_usage_error(mesh("replicate=2,rows=2", "4"), {"--mesh", "'rows'"});
  expect_usage_error(mesh("replicate=two", "4"), {"--mesh", "'two'"});
  expect_usage_error(mesh("replicate=0", "4"), {"--mesh", "'0'"});
  expect_usage_error(mesh("replicate=-2,shard=-2", "4"), {"--mesh", "'-2'"});
  expect_usage_error(mesh("shard=2,shard=2", "4"), {"--mesh", "twice"});
  expect_usage_error(mesh("shard=2,", "4"), {"--mesh", "missing"});
}

TEST(Words, SharesMustBeDivisibleAmongTheRanksAndTheBatchAmongThem) {
  const auto shares = [](const Words& more) {
    Words words = {"train", "--deterministic"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  expect_usage_error(shares({"--ranks", "4", "--virtual-ranks", "6"}), {"--virtual-ranks 6", "4 ranks"});
  expect_usage_error(shares({"--ranks", "3"}), {"--virtual-ranks 8", "3 ranks"});
  expect_usage_error(shares({"--virtual-ranks", "0"}), {"--virtual-ranks", "at least 1"});
  expect_usage_error(shares({"--ranks", "2", "--accumulate", "2"}), {"--accumulate 2", "4 micro-batches"});
  expect_usage_error(shares({"--ranks", "2", "--accumulate", "1"}), {"--accumulate 1", "4 micro-batches"});
  expect_usage_error(shares({"--ranks", "2", "--batch", "12"}), {"--batch 12", "8 shares", "16"});
}

TEST(Words, TheSameBitsAreNotPromisedInFloat16) {
  expect_usage_error({"train", "--deterministic", "--dtype", "f16"}, {"--deterministic", "--dtype f16", "bf16 or f32"});
}

TEST(Words, AnEstimateIsToldWhatItNeeds) {
  EXPECT_THAT(run({"estimate", "--help"}).out,
              AllOf(HasSubstr("--params"), HasSubstr("--strategy"), HasSubstr("--json")));
  expect_usage_error({"estimate", "--loud"}, {"--loud", "plumb estimate --help"});
  expect_usage_error({"estimate", "--params", "many"}, {"--params", "'many'"});
  expect_usage_error({"estimate", "--params", "0"}, {"--params", "'0'"});
  expect_usage_error({"estimate", "--ranks", "0"}, {"--ranks", "at least 1"});
  expect_usage_error({"estimate", "--strategy", "zero9"}, {"--strategy", "'zero9'", "ddp"});
  expect_usage_error({"estimate", "--ranks", "4", "--mesh", "shard=3"}, {"--mesh", "4 ranks"});
}

TEST(Words, SeedsEndWhereNumbersDo) {
  expect_usage_error({"sim", "--first", "18446744073709551615", "--seeds", "2"},
                     {"--first 1844", "--seeds 2", "smaller"});
}

TEST(Words, ZeroRanksAreTooFew) {
  expect_usage_error({"train", "--ranks", "0"}, {"--ranks", "at least 1"});
  expect_usage_error({"train", "--ranks", "-2"}, {"--ranks", "at least 1"});
}

TEST(Words, ABatchThatDoesNotDivideIsToldWhichWould) {
  expect_usage_error({"train", "--batch", "10", "--ranks", "2", "--accumulate", "3"},
                     {"--batch 10", "2 ranks", "3 micro-batches", "12"});
}

TEST(Words, ADataFileMustBeThereAndBeText) {
  const Scratch scratch;
  const std::string out = scratch.path("run");
  const auto data = [&](const std::string& file) {
    return Words{"train", "--data", file, "--out", out, "--ranks", "2"};
  };
  expect_usage_error(data(scratch.path("none.txt")), {"none.txt", "does not exist"});
  expect_usage_error(data(scratch.write("empty.txt", "")), {"empty.txt", "is empty"});
  expect_usage_error(data(scratch.path(".")), {"is a folder"});
  expect_usage_error(data(scratch.write("short.txt", "too short")), {"short.txt", "9 bytes", "130"});
  expect_usage_error(data(scratch.write("binary.txt", std::string(1000, '\0'))), {"binary.txt", "not text", "byte 0"});
  EXPECT_FALSE(scratch.has("run"));
}

// A pipe that nobody writes to would be waited for for ever.
TEST(Words, AFileThatIsAPipeIsRefused) {
  const Scratch scratch;
  const std::string pipe = scratch.path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const char* flag : {"--data", "--config"}) {
    const Result result = shell("exec timeout 20 \"$PLUMB\" train \"$@\"", {flag, pipe});
    EXPECT_EQ(result.code, 2) << flag;
    EXPECT_THAT(result.err, HasSubstr("no regular file"));
  }
}

TEST(Words, ABucketOfLessThanAByteIsOne) {
  const Words times = {"estimate", "--latency", "1ms", "--bandwidth", "10", "--bucket-mb", "1e-7"};
  EXPECT_EQ(run([&] {
              Words words = times;
              for (const char* word : {"--layers", "1", "--width", "16", "--heads", "2"}) words.emplace_back(word);
              return words;
            }())
                .code,
            0);
  Words large = times;
  large.insert(large.end(), {"--params", "7B"});
  const Result result = run(large);
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("more than ten million buckets"));
}

TEST(Words, WhatIsGivenIsNotTakenForNotGiven) {
  const std::string least = std::to_string(std::numeric_limits<int64_t>::min());
  EXPECT_EQ(run(tiny({"--ranks", least})).code, 2);
  EXPECT_EQ(run(tiny({"--accumulate", least})).code, 2);
  const Scratch scratch;
  const std::string file = scratch.write("a.toml", "ranks = 0\n");
  EXPECT_EQ(run(tiny({"--config", file})).code, 2);
  EXPECT_THAT(run(tiny({"--config", file, "--config", file})).err, HasSubstr("--config is there twice"));
  EXPECT_EQ(run({"estimate", "--latency", "10ms,gbps=5"}).code, 2);
  EXPECT_EQ(run({"sim", "--scenario="}).code, 2);
  for (const char* word : {"verify", "inspect"}) EXPECT_EQ(run({"checkpoint", word, "--help"}).code, 0);
}

TEST(Words, AnEstimateGoesAsFarAsItsNumbers) {
  EXPECT_EQ(run({"estimate", "--ranks", "8192", "--mesh", "shard=8192"}).code, 0);
  const Result result = run({"estimate", "--ranks", "1000000000", "--params", "7B", "--accumulate", "1000000",
                             "--backend", "nccl", "--latency", "1us"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("more rounds than a number holds"));
}

TEST(Words, AFolderThatCannotBeMadeIsToldBeforeTheRun) {
  const Scratch scratch;
  const std::string file = scratch.write("file", "x");
  for (const char* flag : {"--checkpoint", "--record"}) {
    const Result result = run(tiny({flag, file + "/below"}));
    EXPECT_EQ(result.code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr("is not a folder"));
  }
}

TEST(Words, ALinkThatNothingCrossesIsRefused) {
  const Result result = run(tiny({"--shape", "gbps=1e-300"}));
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("has 'gbps=1e-300'"));
}

TEST(Words, AConfigFileMustBeThereAndBeUnderstood) {
  const Scratch scratch;
  const auto config = [&](const std::string& name, const std::string& text) {
    return Words{"train", "--config", scratch.write(name, text), "--out", scratch.path("run")};
  };
  expect_usage_error({"train", "--config", scratch.path("none.toml")}, {"none.toml", "does not exist"});
  expect_usage_error({"train", "--config", scratch.path(".")}, {"cannot be read"});
  expect_usage_error(config("empty.toml", ""), {"empty.toml", "is empty"});
  expect_usage_error(config("comment.toml", "# nothing\n"), {"comment.toml", "is empty"});
  expect_usage_error(config("broken.toml", "steps = 3\nlr = = 1\n"), {"broken.toml", "line 2"});
  expect_usage_error(config("unknown.toml", "steps = 3\n\npigeons = 2\n"), {"line 3", "unknown key 'pigeons'"});
  expect_usage_error(config("table.toml", "[train]\nsteps = 3\n"), {"line 1", "unknown key 'train'"});
  expect_usage_error(config("type.toml", "steps = \"three\"\n"), {"line 1", "'steps'", "whole number", "string"});
  expect_usage_error(config("type2.toml", "json = 1\n"), {"line 1", "'json'", "true or false", "integer"});
  expect_usage_error(config("range.toml", "ranks = 0\n"), {"--ranks", "at least 1"});
  expect_usage_error(config("inf.toml", "\nlr = inf\n"), {"line 2", "'lr'", "finite", "inf"});
  expect_usage_error(config("nan.toml", "clip = nan\n"), {"line 1", "'clip'", "finite", "nan"});
  EXPECT_FALSE(scratch.has("run"));
}

TEST(Words, AnOutputThatIsAFileIsRefused) {
  const Scratch scratch;
  expect_usage_error({"train", "--out", scratch.write("file", "x")}, {"--out", "not a folder"});
}

}  // namespace

}  // namespace plumb::test

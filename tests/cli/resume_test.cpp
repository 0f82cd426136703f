// What a run that is started again goes on from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::HasSubstr;

// What lay in the folder before is another run's, unless the run was to go on from there.
TEST(Resume, ARestartGoesOnFromItsOwnRunAlone) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved");
  const auto begin = [&](const Words& more) {
    Words words = {"--json", "--steps", "3", "--questions", "8", "--ranks", "2", "--checkpoint", folder};
    words.insert(words.end(), more.begin(), more.end());
    return tiny(words);
  };
  ASSERT_EQ(run(begin({"--steps", "2", "--seed", "5"})).code, 0);
  const Result result =
      run(begin({"--resume", "never", "--restarts", "1"}), {{"PLUMB_FAULT", "rank=1,point=step:2,kind=kill"}});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("restart 1 of 1"));
  EXPECT_EQ(result.last()["resumed_from_step"], 0);
}

TEST(Resume, ARestartGoesOnWithItsLog) {
  const Scratch scratch;
  const Result result =
      run(tiny({"--json", "--steps", "4", "--questions", "8", "--ranks", "2", "--checkpoint", scratch.path("saved"),
                "--save-every", "2", "--restarts", "1", "--out", scratch.path("run")}),
          {{"PLUMB_FAULT", "rank=1,point=step:4,kind=kill"}});
  ASSERT_EQ(result.code, 0) << result.err;
  std::ifstream log(scratch.path("run/log.jsonl"));
  std::vector<int64_t> steps;
  for (std::string line; std::getline(log, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("step")) steps.push_back(json["step"]);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4}));
}

TEST(Resume, AWrongByteIsPassedOverForTheOneBefore) {
  const Scratch scratch;
  const std::string folder = scratch.path("saved");
  const auto again = [&](const Words& more) {
    Words words = {"--json", "--questions", "8", "--ranks", "2", "--checkpoint", folder};
    words.insert(words.end(), more.begin(), more.end());
    return run(tiny(words));
  };
  const auto damage = [&](const std::string& name) {
    const std::string file = folder + "/" + name + "/weights-00000-of-00002.safetensors";
    ASSERT_TRUE(std::filesystem::exists(file));
    std::fstream bits(file, std::ios::in | std::ios::out | std::ios::binary);
    bits.seekp(-3, std::ios::end);
    bits.put('\x55');
  };
  ASSERT_EQ(again({"--steps", "4", "--save-every", "2"}).code, 0);
  damage("save-00000002-step-4");
  const Result older = again({"--steps", "5"});
  ASSERT_EQ(older.code, 0) << older.err;
  EXPECT_EQ(older.last()["resumed_from_step"], 2);
  EXPECT_THAT(older.err, HasSubstr("a checkpoint is passed over: "));
  EXPECT_THAT(older.err, HasSubstr("save-00000002-step-4/weights-00000-of-00002.safetensors' was damaged"));
  // One that was named itself is that one, and nothing else.
  const Result named = again({"--steps", "5", "--resume", folder + "/save-00000002-step-4"});
  EXPECT_EQ(named.code, 1);
  EXPECT_THAT(named.err, HasSubstr("was damaged: the checksum"));
}

}  // namespace

}  // namespace plumb::test

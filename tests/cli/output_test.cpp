// Where the program's words go: descriptors that are closed, full, or no longer read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "cli/support/program.h"

namespace plumb::test {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Output, OfARunFolderIsItsOwnWhenStandardDescriptorsAreClosed) {
  const Scratch scratch;
  const Words words = tiny({"--json", "--steps", "3", "--questions", "8", "--out", scratch.path("run")});
  const Result result = shell("exec \"$PLUMB\" \"$@\" >&- 2>&-", words);
  EXPECT_EQ(result.code, 0) << result.err;
  std::ifstream log(scratch.path("run/log.jsonl"));
  int lines = 0;
  for (std::string line; std::getline(log, line); ++lines) EXPECT_THAT(line, StartsWith("{"));
  EXPECT_EQ(lines, 4);  // three steps and the summary, each once
}

TEST(Output, OfARunFolderThatCannotBeWrittenGivesTheReason) {
  for (const char* name : {"log.jsonl", "report.html"}) {
    const Scratch scratch;
    std::filesystem::create_directories(scratch.path(name));
    scratch.write(std::string(name) + "/file", "x");
    const Result result = run(tiny({"--json", "--steps", "2", "--questions", "8", "--out", scratch.path("")}));
    EXPECT_EQ(result.code, 1) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("cannot write"), HasSubstr(name), HasSubstr("Is a directory")));
  }
}

TEST(Output, ThatDoesNotArriveIsAnError) {
  for (const Words& words : {Words{"--help"}, Words{"estimate"}, Words{"sim", "--list"},
                             tiny({"--json", "--steps", "2", "--questions", "8"}),
                             tiny({"--steps", "2", "--questions", "8", "--ranks", "2"})}) {
    const Result result = shell("exec \"$PLUMB\" \"$@\" >/dev/full", words);
    EXPECT_EQ(result.code, 1) << words.front();
    EXPECT_THAT(result.err, AllOf(StartsWith("plumb: "), HasSubstr("stdout"), HasSubstr("No space left")));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(Output, ThatNobodyReadsAnyMoreIsNone) {
  const Result result = shell("{ \"$PLUMB\" \"$@\"; echo \"code $?\" >&2; } | head -1",
                              tiny({"--json", "--steps", "200", "--questions", "8", "--eval-every", "0"}));
  EXPECT_EQ(result.err, "code 0\n");
  EXPECT_EQ(result.lines().size(), 1u);
}

}  // namespace

}  // namespace plumb::test

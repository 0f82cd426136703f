// What each rank did for itself, told to all: well or not, whatever was thrown.
#include "world/outcome.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "errors.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

const Where kHere{Where::Kind::step, 3, 0, "the work"};

TEST(Outcome, OfWhateverIsThrownIsAFailureWithWords) {
  const Outcome well = attempt([] { return std::string("text"); });
  EXPECT_EQ(well.text, "text");
  EXPECT_EQ(well.error, "");
  EXPECT_EQ(attempt([]() -> std::string { throw std::runtime_error("no luck"); }).error, "no luck");
  EXPECT_NE(attempt([]() -> std::string { throw std::runtime_error(""); }).error, "") << "without a word";
  EXPECT_NE(attempt([]() -> std::string { throw 7; }).error, "") << "nothing of std";
  const std::string of_torch = attempt([]() -> std::string { TORCH_CHECK(false, "no memory"); }).error;
  EXPECT_THAT(of_torch, HasSubstr("no memory"));
  EXPECT_EQ(of_torch.find("frame"), std::string::npos) << of_torch;
}

TEST(Outcome, IsEverybodysTextInTheirOrderOrTheFirstRanksFailure) {
  for (int failing = -1; failing < 3; ++failing) {
    const auto texts = test::errors(3, [&](World world) {
      const Outcome mine = attempt([&]() -> std::string {
        if (failing >= 0 && world.rank() >= failing) throw Error(world.rank(), "");
        return world.rank() == 1 ? "" : "of rank " + std::to_string(world.rank());
      });
      try {
        EXPECT_EQ(share_outcome(world, mine, kHere), (std::vector<std::string>{"of rank 0", "", "of rank 2"}));
      } catch (const RankFailed& failed) {
        EXPECT_EQ(failed.rank, failing);
        throw;
      }
    });
    for (const std::string& text : texts) {
      if (failing < 0) {
        EXPECT_EQ(text, "none");
      } else {
        EXPECT_THAT(text, HasSubstr("the work failed on rank " + std::to_string(failing)));
      }
    }
  }
}

TEST(Outcome, OfRanksThatCalledDifferentThingsNamesBothCalls) {
  const auto texts = test::errors(3, [&](World world) {
    const Where where{Where::Kind::step, 3, 0, world.rank() == 1 ? "load()" : "save()"};
    const Outcome mine{"text", world.rank() == 2 ? "no luck" : ""};
    share_outcome(world, mine, where);
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(texts[rank], HasSubstr("save() failed: rank 1 called load() where rank " + std::to_string(rank) +
                                       " called save(); every rank must call the same"));
  }
  EXPECT_THAT(texts[1], HasSubstr("load() failed: rank 0 called save() where rank 1 called load()"));
}

TEST(Outcome, OfOneRankAloneNamesNoRank) {
  EXPECT_EQ(share_outcome(World(), {"alone", ""}, kHere), std::vector<std::string>{"alone"});
  try {
    share_outcome(World(), {"", "plumb: no luck"}, kHere);
    FAIL();
  } catch (const RankFailed& failed) {
    EXPECT_STREQ(failed.what(), "the work failed: no luck");
  }
}

}  // namespace
}  // namespace plumb

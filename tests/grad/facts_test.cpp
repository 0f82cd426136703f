// Facts on the wire: whatever a rank says, of however many buckets and parameters, comes out as it went in.
#include "grad/facts.h"

#include <gtest/gtest.h>

#include <random>

namespace plumb {
namespace {

TEST(Facts, ComeOutAsTheyWentInForEveryNumberOfBucketsAndParameters) {
  std::mt19937_64 random(7);
  const auto bits = [&](size_t count) {
    std::vector<bool> all(count);
    for (size_t i = 0; i < count; ++i) all[i] = random() % 2 == 1;
    return all;
  };
  const auto number = [&] { return static_cast<int64_t>(random()); };
  // Words hold 64: fewer, all, one more, and none.
  for (const size_t buckets : {0, 1, 5, 63, 64, 65, 128, 192}) {
    for (const size_t parameters : {0, 1, 7, 63, 64, 65, 127, 128, 192, 300}) {
      Facts facts;
      facts.kind = number() % 2 == 0 ? Where::Kind::backward : Where::Kind::step;
      facts.step = number();
      facts.pass = number();
      facts.failed = number() % 2 == 0;
      facts.newcomers = number();
      facts.rules = number();
      facts.settings = number();
      facts.gathers = number();
      facts.weighted = number();
      facts.since = number();
      facts.absent = number() % 2 == 0;
      facts.writes = number() % 2 == 0;
      facts.late = bits(buckets);
      facts.idle = bits(buckets);
      for (auto* const of :
           {&facts.used, &facts.changed, &facts.cleared, &facts.touched, &facts.intact, &facts.extended}) {
        *of = bits(parameters);
      }
      SCOPED_TRACE(c10::str(buckets, " buckets, ", parameters, " parameters"));
      const std::vector<int64_t> words = facts.pack();
      const Facts found = Facts::unpack(words, buckets, parameters);
      EXPECT_EQ(found.pack(), words);
      EXPECT_EQ(found.kind, facts.kind);
      EXPECT_EQ(found.step, facts.step);
      EXPECT_EQ(found.pass, facts.pass);
      EXPECT_EQ(found.failed, facts.failed);
      EXPECT_EQ(found.newcomers, facts.newcomers);
      EXPECT_EQ(found.rules, facts.rules);
      EXPECT_EQ(found.settings, facts.settings);
      EXPECT_EQ(found.gathers, facts.gathers);
      EXPECT_EQ(found.weighted, facts.weighted);
      EXPECT_EQ(found.since, facts.since);
      EXPECT_EQ(found.absent, facts.absent);
      EXPECT_EQ(found.writes, facts.writes);
      EXPECT_EQ(found.late, facts.late);
      EXPECT_EQ(found.idle, facts.idle);
      EXPECT_EQ(found.used, facts.used);
      EXPECT_EQ(found.changed, facts.changed);
      EXPECT_EQ(found.cleared, facts.cleared);
      EXPECT_EQ(found.touched, facts.touched);
      EXPECT_EQ(found.intact, facts.intact);
      EXPECT_EQ(found.extended, facts.extended);
    }
  }
}

}  // namespace
}  // namespace plumb

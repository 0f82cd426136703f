// Who is on which machine: as text and back, as tiers, pretended, and found out at the store.
#include "backend/machines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "plumb/error.h"
#include "world/support/threads.h"

namespace plumb::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

// Numbered in the order of their first ranks, as the store tells them.
std::vector<int> any_machines(std::mt19937& random) {
  std::vector<int> of;
  int count = 0;
  const auto size = 1 + random() % 12;
  while (of.size() < size) {
    const int machine = static_cast<int>(random() % static_cast<unsigned>(count + 1));
    count = std::max(count, machine + 1);
    for (auto more = 1 + random() % 3; more > 0 && of.size() < size; --more) of.push_back(machine);
  }
  return of;
}

TEST(MachinesProperty, AreWhatWasSaidOfThem) {
  std::mt19937 random(11);
  for (int turn = 0; turn < 500; ++turn) {
    const std::vector<int> of = any_machines(random);
    const int size = static_cast<int>(of.size());
    const Machines machines(of), decoded = Machines::decode(Machines(of).encode());
    std::map<int, int> ranks;  // of each machine
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(machines.of(r), of[r]);
      EXPECT_EQ(decoded.of(r), of[r]) << machines.encode();
      ++ranks[of[r]];
    }
    EXPECT_EQ(decoded.encode(), machines.encode());
    EXPECT_EQ(machines.count(), static_cast<int>(ranks.size()));
    // In order, and equally many.
    const bool equal = std::ranges::all_of(ranks, [&](const auto& one) { return one.second == ranks[0]; });
    const bool in_order = std::ranges::is_sorted(of);
    EXPECT_EQ(machines.ranks_each(), equal && in_order ? ranks[0] : 0) << machines.encode();

    // Of some of them, in some order.
    std::vector<int> some(size);
    for (int r = 0; r < size; ++r) some[r] = r;
    if (random() % 3 == 0) std::shuffle(some.begin(), some.end(), random);
    some.resize(1 + random() % some.size());
    std::set<int> there;
    for (const int rank : some) there.insert(of[rank]);
    EXPECT_EQ(machines.together(some), there.size() == 1);
    int runs = 0;
    for (size_t i = 0; i < some.size(); ++i) runs += i == 0 || of[some[i]] != of[some[i - 1]];
    const auto tiers = machines.tiers(some);
    const bool follow = runs == static_cast<int>(there.size());
    ASSERT_EQ(tiers.has_value(), follow && runs > 1 && runs < static_cast<int>(some.size()));
    if (!tiers) continue;
    EXPECT_EQ(tiers->size(), static_cast<int>(some.size()));
    EXPECT_EQ(tiers->machines(), runs);
    int sum = 0;
    for (int m = 0; m < tiers->machines(); ++m) {
      EXPECT_EQ(tiers->first[m], sum);
      sum += tiers->ranks_on(m);
      for (int r = tiers->first[m]; r < sum; ++r) {
        EXPECT_EQ(tiers->machine_of(r), m);
        EXPECT_EQ(of[some[r]], of[some[tiers->first[m]]]);
      }
    }
    EXPECT_EQ(sum, tiers->size());
  }
  EXPECT_EQ(Machines({}).count(), 0);
  EXPECT_EQ(Machines({}).ranks_each(), 0);
  EXPECT_EQ(Machines::apart(3).encode(), "0,1,3;");
}

TEST(PretendedMachines, SpreadTheRanksAsTheyAreWritten) {
  EXPECT_EQ(pretended_machine(0, 4), -1);
  const auto spread = [](const char* text, int size) {
    const Variable set("PLUMB_MACHINES", text);
    std::vector<int> of;
    for (int r = 0; r < size; ++r) of.push_back(pretended_machine(r, size));
    return of;
  };
  EXPECT_THAT(spread("", 2), ElementsAre(-1, -1));
  EXPECT_THAT(spread("1", 3), ElementsAre(0, 0, 0));
  EXPECT_THAT(spread("2", 4), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(spread("2", 6), ElementsAre(0, 0, 0, 1, 1, 1));
  EXPECT_THAT(spread("3", 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(spread("3", 6), ElementsAre(0, 0, 1, 1, 2, 2));
  EXPECT_THAT(spread("1,3", 4), ElementsAre(0, 1, 1, 1));
  EXPECT_THAT(spread("3,1", 4), ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(spread("1,1,2", 4), ElementsAre(0, 1, 2, 2));
}

TEST(PretendedMachines, ThatDoNotFitTheWorldAreAnErrorThatSaysSo) {
  for (const char* text : {"3", "0", "-2", "x", "2x", "2,", "1,2", "3,2", "0,4", "-1,5", "5", "2,2x", ",4", "1,,3"}) {
    const Variable set("PLUMB_MACHINES", text);
    try {
      const int machine = pretended_machine(1, 4);
      EXPECT_STREQ(text, "2,") << "is machine " << machine;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), "plumb: rank 1: PLUMB_MACHINES=" + std::string(text) +
                                  " does not spread a world of 4 ranks; write how many machines there are (2), or how "
                                  "many ranks each has (1,3)");
    }
  }
}

TEST(Sharing, IsForbiddenByTheVariablesThatSaySo) {
  EXPECT_EQ(why_no_sharing(), "");
  {
    const Variable off("PLUMB_SHM", "0"), shaped("PLUMB_SHAPE", "latency=1ms");
    EXPECT_EQ(why_no_sharing(), "PLUMB_SHM=0 forbids it");
  }
  const Variable on("PLUMB_SHM", "1"), plain("PLUMB_SHAPE", "");
  EXPECT_EQ(why_no_sharing(), "");
  const Variable shaped("PLUMB_SHAPE", "latency=1ms");
  EXPECT_EQ(why_no_sharing(), "PLUMB_SHAPE shapes the links between machines");
}

std::vector<std::string> found(int size) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> texts(size);
  expect_all_well(on_threads(size, [&](int rank) { texts[rank] = Machines::find(*store, rank, size).encode(); }));
  return texts;
}

TEST(MachinesAtTheStore, AreTheSameForEveryRank) {
  EXPECT_THAT(found(1), ElementsAre("0,1,1;"));
  EXPECT_THAT(found(3), ElementsAre("0,3,1;", "0,3,1;", "0,3,1;")) << "threads are on one machine";
  {
    const Variable set("PLUMB_MACHINES", "1,2");
    EXPECT_THAT(found(3), ElementsAre("0,1,1;1,2,1;", "0,1,1;1,2,1;", "0,1,1;1,2,1;"));
  }
  const Variable off("PLUMB_SHM", "0");
  EXPECT_THAT(found(3), ElementsAre("0,1,3;", "0,1,3;", "0,1,3;")) << "each alone";
}

// Without white space, for it stands in a list; up to the '/' the machine, behind it the processes' numbering.
TEST(MachinesAtTheStore, HaveAnIdentity) {
  const std::string identity = machine_identity();
  EXPECT_EQ(identity, machine_identity());
  EXPECT_EQ(identity.find_first_of(" \n\t"), std::string::npos);
  EXPECT_EQ(identity.find('/'), 36u) << identity;  // a UUID
  EXPECT_THAT(identity, HasSubstr("/pid:["));
  EXPECT_EQ(identity.back(), ']');
}

TEST(MachinesAtTheStore, OneObjectionIsEverybodys) {
  for (const int objects : {-1, 0, 2}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> heard(3);
    expect_all_well(on_threads(
        3, [&](int rank) { heard[rank] = first_objection(*store, "key", 3, rank == objects ? "it cannot" : ""); }));
    for (const std::string& text : heard) EXPECT_EQ(text, objects < 0 ? "" : "it cannot");
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> heard(3);
  expect_all_well(on_threads(
      3, [&](int rank) { heard[rank] = first_objection(*store, "key", 3, "rank " + std::to_string(rank)); }));
  EXPECT_THAT(heard[0], HasSubstr("rank "));
  EXPECT_EQ(heard[1], heard[0]);
  EXPECT_EQ(heard[2], heard[0]);
}

TEST(MachinesAtTheStore, EverybodysValuesAreReadInTheirOrder) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto text = [](int r) { return r == 3 ? std::string() : std::to_string(10 * r); };
  for (int r = 11; r >= 0; --r) {
    const std::string value = text(r);
    store->set("x/" + std::to_string(r), std::vector<uint8_t>(value.begin(), value.end()));
  }
  const auto values = read_all(*store, "x/", 12);
  ASSERT_EQ(values.size(), 12u);
  for (int r = 0; r < 12; ++r) EXPECT_EQ(values[r], text(r));
  EXPECT_TRUE(read_all(*store, "y/", 0).empty());
}

}  // namespace
}  // namespace plumb::testing

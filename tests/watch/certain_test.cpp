// Which waits cross for certain, and what is said of each; and what a wait does with its work and its time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "watch/support/scene.h"

namespace plumb {
namespace {

using namespace test;
using Kind = Where::Kind;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kSameNumber =
    "; every rank must run the same number of backwards before step() — a rank with nothing to do calls "
    "engine.backward(loss) all the same";
constexpr const char* kSameOrder = "; every rank must build its engines and call them in the same order";

TEST(Crossing, IsToldFromBothPlaces) {
  const struct {
    Where mine, theirs;
    std::string said;
  } table[] = {
      {{Kind::backward, 5, 2, "a"},
       {Kind::backward, 5, 3, "b"},
       "is in backward 2 of step 5, but rank 3 is in backward 3 of step 5" + std::string(kSameNumber)},
      {{Kind::backward, 5, 2, "a"},
       {Kind::backward, 6, 2, "b"},
       "is in backward 2 of step 5, but rank 3 is in backward 2 of step 6" + std::string(kSameNumber)},
      {{Kind::step, 5, 2, "a"},
       {Kind::step, 5, 1, "b"},
       "called step() after 2 backwards, but rank 3 called step() after 1 backward" + std::string(kSameNumber)},
      {{Kind::step, 5, 2, "a"},
       {Kind::step, 6, 2, "b"},
       "called step() number 5 after 2 backwards, but rank 3 called step() number 6 after 2 backwards" +
           std::string(kSameNumber)},
      {{Kind::step, 5, 1, ""},
       {Kind::backward, 5, 1, ""},
       "called step() after 1 backward, but rank 3 is in backward 1 of step 5" + std::string(kSameNumber)},
      {{Kind::backward, 5, 2, "bucket 1"},
       {Kind::backward, 5, 2, "bucket 2"},
       "waits in backward 2 of step 5 (bucket 1), but rank 3 waits in backward 2 of step 5 (bucket 2)" +
           std::string(kSameOrder)},
      {{Kind::setup, 0, 0, "names"},
       {Kind::backward, 1, 1, ""},
       "waits in the set-up (names), but rank 3 waits in backward 1 of step 1" + std::string(kSameOrder)},
      {{Kind::backward, 1, 1, ""},
       {Kind::setup, 0, 0, ""},
       "waits in backward 1 of step 1, but rank 3 waits in the set-up" + std::string(kSameOrder)},
      {{Kind::rebuild, 4, 0, ""},
       {Kind::step, 5, 1, ""},
       "waits in the rebuild of the buckets after step 4, but rank 3 waits in step() number 5 after 1 backward" +
           std::string(kSameOrder)},
  };
  for (const auto& [mine, theirs, said] : table) {
    Scene scene(4, seconds(60));
    cross(scene, theirs);
    EXPECT_EQ(scene.waiting({.number = 7}, mine), "plumb: rank 1: " + said);
    EXPECT_EQ(scene.published.back().ticket.number, 7) << "rank 3 finds the same from its side";
    EXPECT_EQ(scene.published.back().origin, kMe);
  }
}

// Who gathers by name is told what gathers need, from either side.
TEST(Crossing, OfAGatherSaysWhatGathersNeed) {
  for (const bool mine : {false, true}) {
    Scene scene(4, seconds(60));
    cross(scene);
    if (!mine) scene.of(3).ticket.group = gather_index;
    scene.progress->issued[gather_index] = mine ? 7 : 0;
    EXPECT_THAT(scene.waiting({.group = mine ? gather_index : data_index, .number = 7}),
                AllOf(HasSubstr("but rank 3 waits in step() number 5 after 1 backward; ranks that cannot read"),
                      HasSubstr("use the same units")));
  }
}

TEST(Crossing, OfOneMessageNeedsThatBothMeanTheSameMessage) {
  const auto said = [](const std::function<void(Scene&, Ticket&)>& change) {
    Scene scene;
    scene.watch.belong(42);
    for (int r = 0; r < 4; ++r) scene.of(r).issued[gather_index] = 7;
    scene.progress->issued[gather_index] = 7;
    Ticket mine{.group = gather_index, .number = 7, .circle = 42, .what = 1};
    scene.of(0).state = Report::State::waiting;
    scene.of(0).ticket = {.group = gather_index, .number = 7, .circle = 42, .what = 2};
    change(scene, mine);
    const std::string text = scene.waiting(mine);
    return text.find("but rank 0 waits in") != std::string::npos ? "crossed" : text;
  };
  EXPECT_EQ(said([](Scene&, Ticket&) {}), "crossed");
  const std::function<void(Scene&, Ticket&)> apart[] = {
      [](Scene& s, Ticket&) { s.of(0).ticket.what = 1; },
      [](Scene& s, Ticket&) { s.of(0).ticket.number = 6; },
      [](Scene& s, Ticket&) { s.of(0).ticket.number = 8, s.progress->issued[gather_index] = 8; },
      [](Scene& s, Ticket&) { s.of(0).ticket.group = control_index, s.progress->issued[control_index] = 7; },
      [](Scene& s, Ticket&) { s.of(0).ticket.circle = 43; },
      [](Scene& s, Ticket& mine) { s.of(0).ticket.circle = mine.circle = 0; },
      [](Scene& s, Ticket&) { s.of(0).state = Report::State::running; },
      [](Scene&, Ticket& mine) { mine.members = std::make_shared<const std::vector<int>>(std::vector<int>{1, 2}); },
  };
  for (size_t i = 0; i < std::size(apart); ++i) {
    EXPECT_THAT(said(apart[i]), StartsWith("plumb: rank 1: waited ")) << i;
  }
}

// Only what two looks in a row see is certain.
TEST(Crossing, ThatPassedBetweenTwoLooksIsNone) {
  Scene scene;
  cross(scene);
  scene.ask = [](Said& said) { said.heard[3].report.issued[data_index] = said.looks % 2 == 0 ? 7 : 0; };
  EXPECT_THAT(scene.waiting(), HasSubstr("waited"));
  Scene left;
  left.ask = [](Said& said) {
    said.heard[0].report.state = said.looks == 1 ? Report::State::left : Report::State::running;
  };
  EXPECT_THAT(left.waiting(), HasSubstr("rank 0 did not come: it runs outside any collective"));
}

// Another thread of this rank may be about to issue what the other waits for.
TEST(Crossing, IsNotCertainWhileTwoThreadsOfThisRankWait) {
  struct Held : Endless {
    bool wait(milliseconds) override {
      if (calls++ == 0) throw std::runtime_error("a slice is over");
      inside.set_value();
      go_on.get_future().wait();
      return true;
    }
    int calls = 0;
    std::promise<void> inside, go_on;
  };
  Scene scene;
  cross(scene);
  Held held;
  std::thread other([&] { scene.watch.wait(held, kBackward, {.number = 7}); });
  held.inside.get_future().wait();
  EXPECT_THAT(scene.waiting(), HasSubstr("waited"));
  held.go_on.set_value();
  other.join();
}

// ---- the work

TEST(AWait, AsksItsWorkForSlicesAndNeverForMoreThanIsLeft) {
  struct Noted : c10d::Work {
    bool isCompleted() override { return false; }
    bool wait(milliseconds limit) override {
      limits.push_back(limit.count());
      if (limits.size() == 3) return true;
      throw std::runtime_error("a slice is over");
    }
    std::vector<int64_t> limits;
  };
  const auto limits = [](milliseconds timeout, milliseconds slice) {
    Watch watch(kMe, 2, timeout, slice, std::make_shared<Progress>(kMe), nullptr);
    Noted work;
    try {
      watch.wait(work, kBackward, {});
    } catch (const Error&) {
    }
    return work.limits;
  };
  EXPECT_THAT(limits(seconds(3600), milliseconds(70)), ElementsAre(70, 70, 70));
  for (const int64_t limit : limits(seconds(60), seconds(3600))) {
    EXPECT_LE(limit, 60'000);
    EXPECT_GT(limit, 0);
  }
  EXPECT_THAT(limits(milliseconds(0), milliseconds(70)), ElementsAre(1));
}

TEST(AWait, EndsAsItsWorkDidThoughTheSliceWasOverJustBefore) {
  struct Ended : c10d::Work {
    explicit Ended(std::exception_ptr how) : how(std::move(how)) {}
    bool isCompleted() override { return true; }
    bool wait(milliseconds) override { throw std::runtime_error("a slice is over"); }
    std::exception_ptr exception() const override { return how; }
    std::exception_ptr how;
  };
  Scene well;
  Ended work(nullptr);
  EXPECT_NO_THROW(well.watch.wait(work, kBackward, {.number = 7}));
  EXPECT_FALSE(well.watch.failed());
  EXPECT_EQ(well.looks, 0);
  Scene ill;
  Ended failed(std::make_exception_ptr(Error(kMe, "ranks differ")));
  EXPECT_THROW(ill.watch.wait(failed, kBackward, {.number = 7}), Error);
  EXPECT_EQ(ill.published.back().message, Error(kMe, "ranks differ").what());
  EXPECT_EQ(ill.published.back().origin, kMe);
}

TEST(AWatch, CountsEachGroupsCollectivesAndTellsItsEnd) {
  Scene scene;
  EXPECT_EQ(scene.watch.rank(), kMe);
  EXPECT_EQ(scene.watch.count(data_index), 8);
  EXPECT_EQ(scene.watch.count(control_index), 1);
  EXPECT_EQ(scene.watch.count(control_index), 2);
  EXPECT_EQ(scene.progress->issued[data_index].load(), 8);
  EXPECT_EQ(scene.watch.store_messages(), 5);
  scene.watch.leave();
  EXPECT_EQ(scene.left, 1);
  Watch alone(0, 1, seconds(1), seconds(1), std::make_shared<Progress>(0), nullptr);
  EXPECT_EQ(alone.store_messages(), 0);
  EXPECT_NO_THROW(alone.leave());
  EXPECT_NO_THROW(alone.check());
}

// ---- what is told

template <class Thrown>
std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Thrown& error) {
    return error.what();
  } catch (...) {
  }
  return "nothing of this kind";
}

TEST(AFailure, IsPassedOnWithItsOriginAndIsAConsequenceElsewhere) {
  Scene scene(4, seconds(60));
  scene.of(2).state = Report::State::failed;
  scene.of(2).message = "plumb: rank 21: it was not this one";
  Endless work;
  EXPECT_EQ(thrown_by<Consequence>([&] { scene.watch.wait(work, kBackward, {.number = 7}); }),
            "plumb: rank 1: rank 2 failed: rank 21: it was not this one (this rank was in backward 2 of step 5 "
            "(reduction of bucket 3))");
  EXPECT_EQ(scene.published.back().origin, 2) << "who does not say where it began is where it began";
  EXPECT_EQ(thrown_by<Consequence>([&] { scene.watch.check(); }),
            "plumb: rank 1: an earlier failure ended this world: rank 2 failed: rank 21: it was not this one (this "
            "rank was in backward 2 of step 5 (reduction of bucket 3))");
  Scene own;
  own.watch.fail("out of luck", 3, {Kind::step, 5, 1, "x"}, {.group = control_index, .number = 9});
  EXPECT_EQ(own.published.back().message, "out of luck");
  EXPECT_EQ(own.published.back().origin, 3);
  EXPECT_EQ(own.published.back().ticket.number, 9);
  EXPECT_EQ(describe(own.published.back().where), "step() number 5 after 1 backward (x)");
  EXPECT_EQ(thrown_by<Consequence>([&] { own.watch.check(); }),
            "plumb: rank 1: an earlier failure ended this world: out of luck");
  // One that this rank found itself is the cause.
  Scene late;
  EXPECT_EQ(thrown_by<Consequence>([&] { late.watch.wait(work, kBackward, {.number = 7}); }), "nothing of this kind");
}

std::string explained(Scene& scene, const std::exception_ptr& thrown, const Ticket& ticket = {.number = 7}) {
  return thrown_by<Error>([&] { scene.watch.explain(thrown, kBackward, ticket); });
}

// What this rank says of itself is no evidence.
TEST(AFailure, IsNeverFoundInThisRanksOwnReport) {
  const auto lost = std::make_exception_ptr(std::runtime_error("reset"));
  for (const auto state : {Report::State::failed, Report::State::left, Report::State::waiting}) {
    Scene broken;
    broken.of(kMe).state = state;
    broken.heard[kMe].changed = Clock::now() - seconds(3600);
    broken.of(2).state = Report::State::left;
    EXPECT_EQ(explained(broken, lost),
              "plumb: rank 1: rank 2 left the world while this rank was in backward 2 of step 5 (reduction of bucket "
              "3); every rank must take the same steps before its program ends [reset]");
    Scene late;
    late.beats = true;
    for (int r = 0; r < 4; ++r) late.came(r);
    late.of(kMe).state = state;
    late.heard[kMe].changed = Clock::now() - seconds(3600);
    EXPECT_THAT(late.waiting(), HasSubstr("every rank came, but the data did not"));
    Scene crossing;
    cross(crossing);
    std::swap(crossing.heard[3], crossing.heard[kMe]);
    crossing.came(3);
    crossing.came(0);
    EXPECT_THAT(crossing.waiting(), AllOf(HasSubstr("rank 2 did not come"), Not(HasSubstr("rank 1 did"))));
  }
}

TEST(AFailure, OfAConnectionIsLookedIntoUntilThereIsEvidence) {
  const auto lost = std::make_exception_ptr(std::runtime_error("reset"));
  Scene later;
  later.ask = [](Said& said) {
    if (said.looks < 3) return;
    said.heard[3].report.state = Report::State::failed;
    said.heard[3].report.message = "it threw";
  };
  EXPECT_THAT(explained(later, lost), HasSubstr("rank 3 failed: it threw"));
  EXPECT_EQ(later.looks, 3);
  Scene both;
  for (const int r : {0, 3}) both.heard[r].changed = Clock::now() - seconds(3600);
  both.of(3).last = {Point::reduce, 5, 2, 3};
  const std::string said = explained(both, lost);
  EXPECT_THAT(said, AllOf(StartsWith("plumb: rank 1: rank 0 is gone: its process was killed, crashed or hangs (last "
                                     "heard of 3600."),
                          HasSubstr(" s ago); rank 3 is gone"),
                          HasSubstr("ago, last seen reducing bucket 3 in backward 2 of step 5); this rank was in "
                                    "backward 2 of step 5 (reduction of bucket 3) [reset]")));
  Scene deaf;
  deaf.answers = false;
  EXPECT_EQ(
      explained(deaf, lost),
      "plumb: rank 1: lost the connection to another rank in backward 2 of step 5 (reduction of bucket 3), though "
      "all still run; look for their errors, and check the network between them [reset]");
  Scene gone;
  gone.answers = false;
  gone.trouble = "refused";
  EXPECT_EQ(explained(gone, lost),
            "plumb: rank 1: rank 0 is gone, and with it the store that it hosts (or its launcher): refused; this rank "
            "was in backward 2 of step 5 (reduction of bucket 3) [reset]");
}

TEST(AFailure, WithoutAChannelIsToldAsItCame) {
  const auto said = [](const std::exception_ptr& thrown) {
    Watch watch(kMe, 4, seconds(60), seconds(1), std::make_shared<Progress>(kMe), nullptr);
    return thrown_by<Error>([&] { watch.explain(thrown, kBackward, {}); });
  };
  const std::string place = "backward 2 of step 5 (reduction of bucket 3)";
  EXPECT_EQ(said(std::make_exception_ptr(std::runtime_error("reset\nframe"))),
            "plumb: rank 1: communication failed in " + place + ": reset");
  EXPECT_EQ(said(std::make_exception_ptr(5)),
            "plumb: rank 1: communication failed in " + place + ": an unknown exception");
  for (const char* text : {"Timed out", "timed out", "Timeout of it", "a timeout"}) {
    EXPECT_EQ(
        said(std::make_exception_ptr(std::runtime_error(text))),
        "plumb: rank 1: waited 60.0 s in " + place + ", and not every rank came within the time-out [" + text + "]");
  }
}

TEST(AFailure, OfTimeNamesWhoeverIsMissingOrSilent) {
  const auto timed_out = std::make_exception_ptr(std::runtime_error("Timed out"));
  Scene missing(4, seconds(90));
  missing.came(3);
  missing.beats = true;
  missing.heard[0].changed = Clock::now() - seconds(5000);
  missing.of(2).state = Report::State::left;
  EXPECT_THAT(explained(missing, timed_out),
              AllOf(StartsWith("plumb: rank 1: waited 90.0 s in backward 2"),
                    HasSubstr(": rank 0 did not come; last heard of 5000."),
                    HasSubstr(" s ago: it runs outside any collective; rank 2 did not come; last heard of 0."),
                    HasSubstr(": it left the world [Timed out]"), Not(HasSubstr("rank 3"))));
  // A report that does not move means nothing where reports never do.
  Scene quiet;
  for (int r = 0; r < 4; ++r) quiet.came(r);
  quiet.heard[2].changed = Clock::now() - seconds(3600);
  EXPECT_THAT(explained(quiet, timed_out), HasSubstr("every rank came, but the data did not"));
  Scene silent;
  silent.beats = true;
  for (int r = 0; r < 4; ++r) silent.came(r);
  for (const int r : {2, 3}) silent.heard[r].changed = Clock::now() - seconds(3600);
  EXPECT_THAT(explained(silent, timed_out),
              AllOf(HasSubstr(": rank 2 came, and was last heard of 3600."), Not(HasSubstr("rank 3"))));
  Scene deaf;
  deaf.answers = false;
  deaf.trouble = "refused";
  EXPECT_THAT(explained(deaf, timed_out), HasSubstr(", and not every rank came within the time-out; rank 0 is gone, "
                                                    "and with it the store: refused [Timed out]"));
}

TEST(AFailure, OfTheDeadIsThatOfWhoFailed) {
  const auto dead = std::make_exception_ptr(RanksGone({2, 3}));
  Scene scene;
  scene.of(2).state = Report::State::left;
  scene.of(3).state = Report::State::failed;
  scene.of(3).message = "out of memory";
  EXPECT_THAT(explained(scene, dead), HasSubstr("rank 3 failed: out of memory"));
  Scene left;
  left.of(2).state = left.of(3).state = Report::State::left;
  EXPECT_THAT(explained(left, dead), HasSubstr("for rank 2, which has left the world"));
  Scene deaf;
  deaf.answers = false;
  EXPECT_EQ(explained(deaf, dead),
            "plumb: rank 1: rank 2 is gone: its process was killed or crashed; rank 3 is gone: its process was killed "
            "or crashed; this rank was in backward 2 of step 5 (reduction of bucket 3)");
}

}  // namespace
}  // namespace plumb

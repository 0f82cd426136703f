// What the watch concludes from what it hears: who is missing, failed, gone, or waits for this rank in vain.
#include "watch/watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "watch/support/scene.h"

namespace plumb {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Watch, NamesWhoDidNotCome) {
  Scene scene;
  scene.came(0);
  scene.came(3);
  scene.of(3).state = Report::State::waiting;
  scene.of(3).where = kBackward;
  const std::string said = scene.waiting();
  EXPECT_THAT(said,
              AllOf(HasSubstr("plumb: rank 1: waited"), HasSubstr("in backward 2 of step 5 (reduction of bucket 3)"),
                    HasSubstr("rank 2 did not come: it "), HasSubstr("; rank 3 waits in backward 2 of step 5")));
  EXPECT_THAT(said, AllOf(Not(HasSubstr("rank 0")), Not(HasSubstr("last heard"))));
  EXPECT_EQ(scene.published.front().state, Report::State::waiting) << "the others must know where it waits";
  EXPECT_EQ(scene.published.front().where.step, 5);
  EXPECT_EQ(scene.published.front().ticket.number, 7);
}

// Along an axis: who is no part of it is not what is waited for, however far behind.
TEST(Watch, NamesWhoDidNotComeOfThoseItWaitsFor) {
  const Ticket axis{.group = data_index, .number = 7, .members = std::make_shared<std::vector<int>>(std::vector{1, 3})};
  Scene behind;
  EXPECT_THAT(behind.waiting(axis),
              AllOf(HasSubstr("rank 3 did not come: it "), Not(HasSubstr("rank 0")), Not(HasSubstr("rank 2"))));
  Scene stopped;
  stopped.beats = true;
  stopped.came(3);
  for (const int r : {0, 3}) stopped.heard[r].changed = Clock::now() - seconds(3600);
  EXPECT_THAT(stopped.waiting(axis), AllOf(HasSubstr("rank 3 came, and was last heard of 36"),
                                           Not(HasSubstr("did not come")), Not(HasSubstr("rank 0"))));
}

TEST(Watch, SaysWhenAMissingRankWasLastHeardOf) {
  Scene scene;
  scene.beats = true;
  scene.came(0);
  scene.came(3);
  EXPECT_THAT(scene.waiting(), HasSubstr("rank 2 did not come; last heard of "));
}

TEST(Watch, NamesAFewOfManyThatWaitAsItDoes) {
  Scene scene(16);
  for (int r = 0; r < 16; ++r) {
    if (r != 9) scene.came(r);
    scene.of(r).state = Report::State::waiting;
    scene.of(r).where = kBackward;
  }
  scene.of(9).state = Report::State::running;
  const std::string said = scene.waiting();
  int named = 0;
  for (size_t at = 0; (at = said.find("waits in backward 2", at)) != std::string::npos; ++at) ++named;
  EXPECT_EQ(named, 8) << said;
  EXPECT_THAT(said, HasSubstr("rank 9 did not come"));
}

TEST(Watch, WhereEverybodyCameNamesTheSilentOrTheNetwork) {
  Scene well;
  for (int r = 0; r < 4; ++r) well.came(r);
  well.heard[2].changed = Clock::now() - seconds(3600);  // where nobody tells that he lives, silence says nothing
  EXPECT_THAT(well.waiting(), HasSubstr("every rank came, but the data did not"));
  Scene hangs;
  hangs.beats = true;
  for (int r = 0; r < 4; ++r) hangs.came(r);
  hangs.heard[2].changed = Clock::now() - seconds(3600);
  hangs.of(2).last = {Point::reduce, 5, 2, 3};
  EXPECT_THAT(hangs.waiting(), AllOf(HasSubstr("rank 2 came, and was last heard of 36"),
                                     HasSubstr("it is stopped or hangs, last seen reducing bucket 3")));
  Scene ended;  // who has left after its part is silent for good
  ended.beats = true;
  ended.heard = hangs.heard;
  ended.heard[0] = ended.heard[2];
  ended.of(0).state = Report::State::left;
  EXPECT_THAT(ended.waiting(), AllOf(HasSubstr("rank 2 came, and was last heard of"), Not(HasSubstr("rank 0 came"))));
  hangs.of(3).state = Report::State::waiting;  // as this one does: that is no reason to blame the network
  hangs.of(3).where = kBackward;
  Scene both;
  both.beats = true;
  both.heard = hangs.heard;
  EXPECT_THAT(both.waiting(), AllOf(HasSubstr("rank 2 came, and was last heard of 36"),
                                    HasSubstr("; rank 3 waits in backward 2 of step 5"), Not(HasSubstr("network"))));
}

TEST(Watch, FollowsARankThatFailed) {
  Scene scene(4, seconds(60));
  scene.of(2).state = Report::State::failed;
  scene.of(2).message = "plumb: rank 2: rank 0 is gone";
  scene.of(2).origin = 0;
  const std::string said = scene.waiting();
  EXPECT_THAT(said, HasSubstr("plumb: rank 1: rank 2 failed: rank 0 is gone (this rank was in backward 2 of step 5"));
  EXPECT_EQ(scene.published.back().origin, 0) << "where it began is passed on";
}

// Also of what it hears at the very last, when its own time is over.
TEST(Watch, FollowsARankThatFailedWhenItsOwnTimeIsOver) {
  // The look before the last sees nothing yet, however slow the machine is.
  Scene late;
  late.ask = [&](Said& said) {
    if (said.looks == 2) said.heard[2].report.state = Report::State::failed;
    if (said.looks == 1) std::this_thread::sleep_for(milliseconds(60));
  };
  late.of(2).message = "it ran out of luck";
  EXPECT_THAT(late.waiting(), HasSubstr("rank 2 failed: it ran out of luck"));
  EXPECT_EQ(late.looks, 2);
}

TEST(Watch, RanksThatWaitForEachOtherAreToldSo) {
  Scene scene(4, seconds(60));
  cross(scene);
  EXPECT_THAT(scene.waiting(), AllOf(HasSubstr("is in backward 2 of step 5, but rank 3 called step() after 1 backward"),
                                     HasSubstr("the same number of backwards")));
  EXPECT_EQ(scene.looks, 2) << "seen once, it may pass";
}

// Where they are not even in one step, both numbers are told.
TEST(Watch, RanksThatWaitForEachOtherInDifferentStepsAreToldWhichOnes) {
  Scene scene(4, seconds(60));
  cross(scene);
  scene.of(3).where = {Where::Kind::step, 6, 1, ""};
  EXPECT_THAT(scene.waiting(),
              HasSubstr("is in backward 2 of step 5, but rank 3 called step() number 6 after 1 backward; every rank"));
}

// Who found it first has failed by then; this rank says the same from its side, at once.
TEST(Watch, ARankThatGaveUpAWaitThatCrossesOursIsNotMerelyFollowed) {
  Scene scene(4, seconds(60));
  cross(scene);
  scene.of(3).state = Report::State::failed;
  scene.of(3).message = "plumb: rank 3: called step() after 1 backward, but rank 1 is in backward 2 of step 5";
  EXPECT_THAT(scene.waiting(), HasSubstr("is in backward 2 of step 5, but rank 3 called step() after 1 backward"));
  EXPECT_EQ(scene.looks, 1);
}

// A long wait that ended well leaves nothing behind: the others read that this rank runs, and the next wait is judged alone.
TEST(Watch, AWaitThatEndedWellIsForgotten) {
  struct Late : Endless {
    explicit Late(const Said& said) : said(said) {}
    bool wait(milliseconds limit) override { return said.looks >= 2 || Endless::wait(limit); }
    const Said& said;
  };
  Scene scene(4, seconds(5));
  for (int turn = 1; turn <= 2; ++turn) {
    Late late(scene);
    scene.looks = 0;
    scene.watch.wait(late, kBackward, {.group = data_index, .number = 7});
    ASSERT_EQ(scene.published.size(), 2u * static_cast<size_t>(turn));
    EXPECT_EQ(scene.published.end()[-2].state, Report::State::waiting);
    EXPECT_EQ(scene.published.end()[-2].wait, turn) << "each has a number of its own";
    EXPECT_EQ(scene.published.back().state, Report::State::running);
  }
  cross(scene);
  EXPECT_THAT(scene.waiting(), HasSubstr("but rank 3 called step() after 1 backward"));
}

TEST(Watch, WaitsThatOnlySeemToCrossDoNot) {
  const auto not_crossed = [](const std::function<void(Scene&)>& change, Ticket ticket = {.number = 7}) {
    Scene scene;
    cross(scene);
    change(scene);
    EXPECT_THAT(scene.waiting(ticket), HasSubstr("waited")) << "instead of the time-out";
  };
  not_crossed([](Scene& s) { s.ask = [](Said& said) { ++said.heard[3].report.wait; }; });  // another wait each time
  not_crossed([](Scene& s) { s.progress->issued[control_index] = 4; });                    // we have issued it
  not_crossed([](Scene& s) { s.came(3); });                                                // it has issued ours
  not_crossed([](Scene& s) { s.of(3).ticket.number = 0; });                                // it does not say for what
  not_crossed([](Scene& s) { s.of(3).ticket.circle = 42; });                               // not among us
  not_crossed([](Scene&) {},
              {.number = 7, .members = std::make_shared<const std::vector<int>>(std::vector<int>{0, 1})});
}

TEST(Watch, AWaitAmongSomeRanksCrossesOfThoseItBelongsTo) {
  Scene scene(4, seconds(60));
  cross(scene);
  scene.of(3).ticket.circle = 42;
  scene.watch.belong(42);
  EXPECT_THAT(scene.waiting(), HasSubstr("but rank 3 called step()"));
}

TEST(Watch, RanksThatSayDifferentThingsOfOneMessageAreToldBoth) {
  const Ticket mine{.group = gather_index, .number = 7, .circle = 42, .what = 1};
  Scene scene(4, seconds(60));
  scene.watch.belong(42);
  scene.of(0).state = Report::State::waiting;
  scene.of(0).ticket = {.group = gather_index, .number = 7, .circle = 42, .what = 2};
  scene.of(0).issued[gather_index] = 7;
  scene.of(0).where = {Where::Kind::backward, 5, 2, "gathering the head"};
  EXPECT_THAT(scene.waiting(mine), AllOf(HasSubstr("but rank 0 waits in backward 2 of step 5 (gathering the head)"),
                                         HasSubstr("use the same units")));
  Scene alike;
  for (int r = 0; r < 4; ++r) alike.of(r).issued[gather_index] = 7;
  alike.of(0).state = Report::State::waiting;
  alike.of(0).ticket = mine;
  EXPECT_THAT(alike.waiting(mine), HasSubstr("every rank came"));
  // Of another message, another circle or another group it may say what it likes.
  for (const Ticket& its : {Ticket{.group = gather_index, .number = 8, .circle = 42, .what = 2},
                            Ticket{.group = gather_index, .number = 7, .circle = 43, .what = 2},
                            Ticket{.group = data_index, .number = 7, .circle = 42, .what = 2}}) {
    Scene another;
    another.watch.belong(42);
    for (int r = 0; r < 4; ++r) another.of(r).issued[gather_index] = 8;
    another.of(0).issued[data_index] = 7;
    another.of(0).state = Report::State::waiting;
    another.of(0).ticket = its;
    EXPECT_THAT(another.waiting(mine), HasSubstr("every rank came")) << its.number << its.circle << its.group;
  }
}

TEST(Watch, ARankThatLeftIsNamedWhereItIsNeeded) {
  Scene scene(4, seconds(60));
  scene.of(0).state = Report::State::left;
  EXPECT_THAT(scene.waiting(), HasSubstr("for rank 0, which has left the world"));
  EXPECT_EQ(scene.looks, 2) << "its last collective may still be on its way";
  Scene done;
  for (int r = 0; r < 4; ++r) done.came(r);
  done.of(0).state = Report::State::left;
  EXPECT_THAT(done.waiting(), HasSubstr("every rank came"));
}

TEST(Watch, AStoreThatIsGoneIsAnErrorAfterThreeLooks) {
  Scene scene(4, seconds(60));
  scene.answers = false;
  scene.trouble = "connection refused";
  EXPECT_THAT(scene.waiting(),
              AllOf(HasSubstr("the store that the ranks met at is gone"), HasSubstr("connection refused")));
  EXPECT_EQ(scene.looks, 3);
  Scene slow;
  slow.answers = false;
  EXPECT_THAT(slow.waiting(), HasSubstr("not every rank came within the time-out"));
}

TEST(Watch, SomebodyElsesClaimEndsTheWorld) {
  Scene scene(4, seconds(60));
  scene.watch.check();
  scene.objection = "two processes claim number 2";
  EXPECT_THAT(scene.waiting(), HasSubstr("two processes claim number 2"));
}

TEST(Watch, TheFirstFailureIsTheOneThatIsTold) {
  Scene scene;
  scene.watch.fail("plumb: rank 1: first", kMe, kBackward);
  scene.watch.fail("plumb: rank 1: second", kMe, kBackward);
  try {
    scene.watch.check();
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("first"), Not(HasSubstr("second"))));
  }
}

// ---- what a backend threw

std::string explained(Watch& watch, const std::exception_ptr& thrown, const Ticket& ticket = {}) {
  try {
    watch.explain(thrown, {.detail = "a reduction"}, ticket);
  } catch (const Error& error) {
    EXPECT_TRUE(watch.failed());
    return error.what();
  }
}

std::string explained(const Ticket& ticket, std::vector<int> gone) {
  Watch watch(kMe, 4, seconds(60), seconds(1), std::make_shared<Progress>(kMe), nullptr);
  return explained(watch, std::make_exception_ptr(RanksGone(std::move(gone))), ticket);
}

// Ranks of an axis are counted from 0 by its backend; people know them by their place in the world.
TEST(Watch, NamesTheRanksOfAnAxisAsTheWorldDoes) {
  const Ticket axis{.members = std::make_shared<const std::vector<int>>(std::vector<int>{1, 3})};
  const std::string of_axis = explained(axis, {1});
  EXPECT_THAT(of_axis, HasSubstr("plumb: rank 1: rank 3 is gone"));
  EXPECT_THAT(of_axis, Not(HasSubstr("rank 1 is gone")));
  EXPECT_THAT(explained({}, {2, 3}), HasSubstr("rank 2 is gone: its process was killed or crashed; rank 3 is gone"));
}

TEST(Watch, TheLastWordsOfTheDeadSayWhetherTheyAreTheCause) {
  Scene killed;
  killed.of(2).last = {Point::update, 5, 1};
  killed.of(3).state = Report::State::left;
  EXPECT_THAT(explained(killed.watch, std::make_exception_ptr(RanksGone({2, 3}))),
              AllOf(HasSubstr("rank 2 is gone: its process was killed or crashed, last seen updating parameters"),
                    Not(HasSubstr("rank 3 is gone"))));
  Scene failed;
  failed.of(3).state = Report::State::failed;
  failed.of(3).message = "out of memory";
  EXPECT_THAT(explained(failed.watch, std::make_exception_ptr(RanksGone({3}))),
              HasSubstr("rank 3 failed: out of memory"));
  Scene left;
  left.of(3).state = Report::State::left;
  EXPECT_THAT(explained(left.watch, std::make_exception_ptr(RanksGone({3}))),
              HasSubstr("for rank 3, which has left the world"));
}

TEST(Watch, ALostConnectionIsFollowedToWhoeverIsSilentFailedOrLeft) {
  const auto lost = std::make_exception_ptr(std::runtime_error("connection reset. This is typically a guess\nframe 1"));
  Scene silent;
  silent.heard[2].changed = Clock::now() - seconds(3600);
  EXPECT_THAT(explained(silent.watch, lost),
              AllOf(HasSubstr("rank 2 is gone"), HasSubstr("[connection reset]"), Not(HasSubstr("rank 0 is gone"))));
  Scene failed;
  failed.of(0).state = Report::State::failed;
  failed.of(0).message = "it threw";
  EXPECT_THAT(explained(failed.watch, lost), HasSubstr("rank 0 failed: it threw"));
  Scene left;
  left.of(3).state = Report::State::left;
  EXPECT_THAT(explained(left.watch, lost),
              HasSubstr("rank 3 left the world while this rank was in the set-up (a reduction)"));
  Scene axis;  // who is no part of it has broken none of its connections
  axis.of(0).state = axis.of(3).state = Report::State::left;
  EXPECT_THAT(explained(axis.watch, lost, {.members = std::make_shared<const std::vector<int>>(std::vector{1, 3})}),
              HasSubstr("rank 3 left the world while this rank was in the set-up (a reduction)"));
  Scene late;
  late.came(0);
  late.came(3);
  const auto timed_out = std::make_exception_ptr(std::runtime_error("Timed out waiting 60000ms"));
  EXPECT_THAT(explained(late.watch, timed_out, {.number = 7}),
              AllOf(HasSubstr("rank 2 did not come"), HasSubstr("[Timed out")));
}

TEST(Watch, AnErrorOfOursIsCompleteAsItIs) {
  Scene scene;
  EXPECT_EQ(explained(scene.watch, std::make_exception_ptr(Error(kMe, "ranks differ"))),
            Error(kMe, "ranks differ").what());
}

}  // namespace
}  // namespace plumb

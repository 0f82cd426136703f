// What ranks tell each other of themselves: as text and back, and as sentences.
#include "watch/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "watch/report_channel.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

Report any_report() {
  const auto number = [] { return *rc::gen::arbitrary<int64_t>(); };
  Report report;
  report.state = static_cast<Report::State>(*rc::gen::inRange(0, 4));
  report.beat = number();
  for (int64_t& count : report.issued) count = number();
  report.last = {static_cast<Point>(*rc::gen::inRange(0, kPoints)), number(), number(), number(),
                 static_cast<Point>(*rc::gen::inRange(0, kPoints))};
  report.wait = number();
  report.ticket = {
      .group = *rc::gen::inRange(0, group_count), .number = number(), .circle = number(), .what = number()};
  report.where = {static_cast<Where::Kind>(*rc::gen::inRange(0, 4)), number(), number(),
                  *rc::gen::arbitrary<std::string>()};
  report.origin = *rc::gen::arbitrary<int>();
  report.message = *rc::gen::arbitrary<std::string>();
  return report;
}

RC_GTEST_PROP(Report, ComesBackAsItWasWhateverItSays, ()) {
  const Report one = any_report();
  const Report other = Report::decode(one.encode());
  RC_ASSERT(one.state == other.state);
  RC_ASSERT(one.beat == other.beat);
  RC_ASSERT(one.issued == other.issued);
  RC_ASSERT(one.last.point == other.last.point && one.last.beside == other.last.beside);
  RC_ASSERT(one.last.step == other.last.step && one.last.pass == other.last.pass && one.last.index == other.last.index);
  RC_ASSERT(one.wait == other.wait && one.origin == other.origin && one.message == other.message);
  RC_ASSERT(one.ticket.group == other.ticket.group && one.ticket.number == other.ticket.number);
  RC_ASSERT(one.ticket.circle == other.ticket.circle && one.ticket.what == other.ticket.what);
  RC_ASSERT(one.where.kind == other.where.kind && one.where.step == other.where.step);
  RC_ASSERT(one.where.pass == other.where.pass && one.where.detail == other.where.detail);
}

// A store may hold half of a text, or somebody else's.
RC_GTEST_PROP(Report, OfATextThatWasCutIsNoCrash, ()) {
  const std::string text = any_report().encode();
  const Report cut = Report::decode(text.substr(0, *rc::gen::inRange<size_t>(0, text.size())));
  RC_ASSERT(cut.message.size() <= text.size());
  Report::decode(*rc::gen::arbitrary<std::string>());
}

// However much of a text is there: what it says of a field is the field, and what it does not say is as in a report of
// nothing. A detail that is not all there is none.
TEST(Report, OfATextThatWasCutSaysNothingThatItDidNot) {
  Report whole;
  whole.state = Report::State::failed;
  whole.beat = 3;
  whole.issued = {4, 5, 6};
  whole.last = {Point::agree, 7, 8, 9, Point::join};
  whole.wait = 2;
  whole.ticket = {.group = gather_index, .number = 3, .circle = 4, .what = 5};
  whole.where = {Where::Kind::step, 6, 7, "detail"};
  whole.origin = 8;
  whole.message = "message";
  const Report nothing;
  const std::string text = whole.encode();
  const auto fields = [](const Report& r) {
    return std::vector<int64_t>{static_cast<int64_t>(r.state),
                                r.beat,
                                r.issued[0],
                                r.issued[1],
                                r.issued[2],
                                static_cast<int64_t>(r.last.point),
                                r.last.step,
                                r.last.pass,
                                r.last.index,
                                static_cast<int64_t>(r.last.beside),
                                r.wait,
                                r.ticket.group,
                                r.ticket.number,
                                r.ticket.circle,
                                r.ticket.what,
                                static_cast<int64_t>(r.where.kind),
                                r.where.step,
                                r.where.pass,
                                r.origin};
  };
  const auto said = fields(whole), unsaid = fields(nothing);
  for (size_t length = 0; length <= text.size(); ++length) {
    const Report cut = Report::decode(text.substr(0, length));
    const auto found = fields(cut);
    const auto known = static_cast<size_t>((length + 1) / 2);  // digits, with blanks between
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i], i < known ? said[i] : unsaid[i]) << "field " << i << " of " << text.substr(0, length);
    }
    const size_t behind = text.size() - length;
    EXPECT_EQ(cut.where.detail, behind > 7 ? "" : "detail") << length;
    EXPECT_EQ(cut.message, behind > 7 ? "" : std::string("message").substr(0, 7 - behind)) << length;
  }
  for (const char* other : {"x", "\n", "x y\nz"}) EXPECT_EQ(fields(Report::decode(other)), unsaid) << other;
}

TEST(Describe, SaysInWhichPlaceARankIs) {
  EXPECT_EQ(describe(Where{}), "the set-up");
  EXPECT_EQ(describe(Where{Where::Kind::backward, 5, 2, "reduction of bucket 3"}),
            "backward 2 of step 5 (reduction of bucket 3)");
  EXPECT_EQ(describe(Where{Where::Kind::step, 5, 1, ""}), "step() number 5 after 1 backward");
  EXPECT_EQ(describe(Where{Where::Kind::step, 5, 2, ""}), "step() number 5 after 2 backwards");
  EXPECT_EQ(describe(Where{Where::Kind::rebuild, 7, 0, ""}), "the rebuild of the buckets after step 7");
}

TEST(Describe, SaysWhatARankDoes) {
  Report report;
  report.where = {Where::Kind::backward, 5, 2, ""};
  report.state = Report::State::waiting;
  EXPECT_EQ(describe(report), "waits in backward 2 of step 5");
  report.state = Report::State::failed;
  report.message = "plumb: rank 3: no memory";
  EXPECT_EQ(describe(report), "failed: rank 3: no memory");
  report.state = Report::State::left;
  EXPECT_EQ(describe(report), "left the world");
}

TEST(Describe, SaysWhichPointWasPassed) {
  EXPECT_EQ(describe(Passed{}), "");
  EXPECT_EQ(describe(Passed{Point::reduce, 5, 1, 3}), "reducing bucket 3 in backward 1 of step 5");
  EXPECT_EQ(describe(Passed{Point::hook, 5, 1, 0}), "taking a gradient of parameter 0 in backward 1 of step 5");
  EXPECT_EQ(describe(Passed{Point::reduce, 5, 1, -1}), "reducing in backward 1 of step 5");
  EXPECT_EQ(describe(Passed{Point::update, 5, 0, 3}), "updating parameters, before any backward of step 5");
  EXPECT_EQ(describe(Passed{Point::step, 2, 1, -1, Point::write}),
            "beginning the step in backward 1 of step 2, writing a checkpoint beside it");
  for (const Point outside : {Point::join, Point::setup, Point::exit}) {
    EXPECT_THAT(describe(Passed{outside, 5, 1, 3}), ::testing::Not(HasSubstr("step 5")));
  }
  EXPECT_STREQ(name_of(static_cast<Point>(-1)), "none");
  EXPECT_STREQ(name_of(static_cast<Point>(kPoints)), "none");
  EXPECT_STREQ(name_of(Point::exit), "exit");
}

// A report is read from a store that somebody else may write to: of what is cut short, nothing is made up.
TEST(Encoded, ReportsThatAreCutShortSayWhatIsWhole) {
  Report report;
  report.state = Report::State::failed;
  report.beat = 12;
  report.issued = {3, 4, 5};
  report.last = {Point::gather, 6, 7, 8};
  report.last.beside = Point::write;
  report.wait = 9;
  report.ticket = {.group = control_index, .number = 10, .circle = 11, .what = 12};
  report.where = {Where::Kind::step, 13, 14, "the detail"};
  report.origin = 2;
  report.message = "the message\nand its trace";
  const std::string text = report.encode();
  const Report whole = Report::decode(text);
  EXPECT_EQ(whole.encode(), text);
  EXPECT_EQ(whole.where.detail, "the detail");
  EXPECT_EQ(whole.message, report.message);
  EXPECT_EQ(Report::decode("").state, Report::State::running);
  EXPECT_EQ(Report::decode("nonsense").state, Report::State::running);
  const size_t body = text.find('\n') + 1;
  for (size_t cut = 0; cut < text.size(); ++cut) {
    const Report found = Report::decode(text.substr(0, cut));
    const bool has_detail = cut >= body + report.where.detail.size();
    EXPECT_EQ(found.where.detail, has_detail ? "the detail" : "") << cut;
    EXPECT_TRUE(report.message.starts_with(found.message)) << cut;
    EXPECT_EQ(found.message.size(), has_detail ? cut - body - report.where.detail.size() : 0) << cut;
  }
}

TEST(Text, LosesItsPrefixAndItsTrace) {
  EXPECT_EQ(without_prefix("plumb: it failed"), "it failed");
  EXPECT_EQ(without_prefix("it failed"), "it failed");
  EXPECT_EQ(first_line("one\ntwo"), "one");
  EXPECT_EQ(first_line("one"), "one");
}

TEST(LocalChannel, TellsEverybodysLatestReportWithWhatTheyHaveDone) {
  const auto all = make_local_reports(3);
  const auto first = std::make_shared<Progress>(0), second = std::make_shared<Progress>(1);
  const auto one = make_local_channel(all, 0, first), two = make_local_channel(all, 1, second);
  Report report;
  report.state = Report::State::waiting;
  report.where = {Where::Kind::step, 4, 1, ""};
  two->publish(report);
  second->issued[control_index] = 7;
  second->road.pass(Point::gather, 4, 1, 2);
  const auto heard = one->read(std::chrono::milliseconds(0));
  ASSERT_TRUE(heard && heard->size() == 3);
  EXPECT_EQ((*heard)[0].report.state, Report::State::running);
  EXPECT_EQ((*heard)[1].report.state, Report::State::waiting);
  EXPECT_EQ((*heard)[1].report.where.step, 4);
  EXPECT_EQ((*heard)[1].report.issued[control_index], 7);
  EXPECT_EQ((*heard)[1].report.issued[data_index], 0);
  EXPECT_EQ((*heard)[1].report.last.index, 2);
  EXPECT_EQ((*heard)[2].report.issued[control_index], 0);  // nobody is there yet
  EXPECT_FALSE(one->beats());
  EXPECT_EQ(one->trouble(), "");
  one->leave();
  EXPECT_EQ((*two->read({}))[0].report.state, Report::State::left);
  report.state = Report::State::failed;
  two->publish(report);
  two->leave();
  EXPECT_EQ((*one->read({}))[1].report.state, Report::State::failed) << "who failed did not merely leave";
}

}  // namespace
}  // namespace plumb

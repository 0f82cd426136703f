// Steps as text, and the page that holds a run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <limits>

#include "report/page.h"
#include "report/run.h"

namespace plumb::report {

namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<Step> run_of(int64_t count) {
  std::vector<Step> steps;
  for (int64_t i = 1; i <= count; ++i) {
    Step step;
    step.step = i;
    step.loss = 1.0 / static_cast<double>(i);
    step.rss_bytes = {1 << 20, 1 << 21};
    steps.push_back(step);
  }
  return steps;
}

TEST(Report, SpeaksInHumanNumbers) {
  EXPECT_EQ(human_count(7), "7");
  EXPECT_EQ(human_count(1234567), "1,234,567");
  EXPECT_EQ(human_count(-123456), "-123,456");
  EXPECT_EQ(human_bytes(312'400'000), "312 MB");
  EXPECT_EQ(human_bytes(1'250'000'000), "1.25 GB");
  EXPECT_EQ(human_time(12.34), "12.3 s");
  EXPECT_EQ(human_time(84), "1 min 24 s");
  EXPECT_EQ(median({3, 1, 2}), 2.0);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({}), 0.0);
}

TEST(Report, PutsAStepOnOneLine) {
  Step step = run_of(1).front();
  step.accuracy = 0.5;
  EXPECT_THAT(line(step, 10), HasSubstr("step  1/10  loss 1.00000"));
  EXPECT_THAT(line(step, 10), HasSubstr("2 MB  accuracy 50.0 %"));
}

TEST(Report, CarriesAnyTextWithoutEndingItsScript) {
  const nlohmann::ordered_json summary = {{"task", "</script><!-- \xff"}};
  const std::string html = page(run_of(3), summary);
  EXPECT_THAT(html, HasSubstr("<\\/script>"));
  EXPECT_THAT(html, Not(HasSubstr("</script><")));
  EXPECT_THAT(html, Not(HasSubstr("<!-- ")));
}

TEST(Report, DrawsALongRunInBins) {
  EXPECT_THAT(page(run_of(1500), {}), HasSubstr("\"bin\":1,"));
  EXPECT_THAT(page(run_of(1501), {}), HasSubstr("\"bin\":2,"));
}

TEST(Report, DrawsALossThatIsNoNumberAsAGap) {
  auto steps = run_of(3);
  steps[1].loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(page(steps, {}), HasSubstr("\"loss\":[1.0,null,0.333"));
}

}  // namespace

}  // namespace plumb::report

// Steps as text, and the page that holds a run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "report/folder.h"
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

TEST(Report, GoesOnWithTheLogOfAnEarlierLife) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / ("plumb-log-" + std::to_string(getpid()));
  const auto lines = [&] {
    std::vector<std::string> all;
    std::ifstream log(path / "log.jsonl");
    for (std::string line; std::getline(log, line);) all.push_back(line);
    return all;
  };
  std::vector<Step> steps = run_of(4);
  steps[1].skipped = true;
  steps[1].grad_norm = std::numeric_limits<double>::infinity();
  steps[2].accuracy = 0.25;
  {
    Folder folder(path);
    for (const Step& step : steps) folder.add(to_json(step));
  }
  std::ofstream(path / "log.jsonl", std::ios::app) << "{\"step\": 5, \"lo";  // where it was killed
  const auto before = lines();
  Folder folder(path);
  const std::vector<Step> kept = folder.go_on(3);
  ASSERT_EQ(kept.size(), 3u);
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(to_json(kept[i]).dump(), to_json(steps[i]).dump());
  folder.add(to_json(run_of(5)[4]));
  const auto after = lines();
  ASSERT_EQ(after.size(), 4u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(after[i], before[i]);
  // Without it, the log is the new run's alone.
  Folder(path).add(to_json(steps[0]));
  EXPECT_EQ(lines().size(), 1u);
  std::filesystem::remove_all(path);
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

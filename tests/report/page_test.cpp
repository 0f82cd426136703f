// The page and the words of a run by plain re-computation, for runs of any length.
#include "report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "plumb/error.h"
#include "report/folder.h"
#include "report/run.h"

namespace plumb::report {

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// Every field another number in every step; now and then one that is none, and one that is only in some.
std::vector<Step> run_of(int64_t count) {
  std::vector<Step> steps;
  for (int64_t i = 1; i <= count; ++i) {
    const auto x = static_cast<double>(i);
    Step step{.step = i + 7, .loss = 1 / x, .grad_norm = x * x, .lr = 0.5 * x, .ms = 3 + x};
    step.rss_bytes = {1000 + i, 2000 + 3 * i, 9000 - i};
    if (i % 7 == 3) step.accuracy = x / 5000;
    if (i % 700 == 5) {
      step.skipped = true;
      step.grad_norm = std::numeric_limits<double>::infinity();
    }
    steps.push_back(step);
  }
  return steps;
}

json data_of(const std::string& html) {
  const std::string before = "const run = ";
  const size_t begin = html.find(before) + before.size();
  return json::parse(html.substr(begin, html.find(";\n", begin) - begin));
}

TEST(Page, DrawsTheMeansOfItsBinsAndTheLastOfWhatIsAState) {
  for (const int64_t count : {1, 2, 1499, 1500, 1501, 3000, 3001, 4000}) {
    SCOPED_TRACE(count);
    const std::vector<Step> steps = run_of(count);
    const json drawn = data_of(page(steps, {{"steps", count}}));
    EXPECT_EQ(drawn["summary"]["steps"], count);
    const json& columns = drawn["columns"];
    const int64_t bin = (count + 1499) / 1500;
    EXPECT_EQ(columns["bin"], bin);
    const auto bins = static_cast<size_t>((count + bin - 1) / bin);
    for (const char* name : {"step", "loss", "norm", "lr", "ms"}) ASSERT_EQ(columns[name].size(), bins) << name;
    ASSERT_EQ(columns["memory"].size(), 3u);
    json accuracy = json::array();
    for (size_t b = 0; b < bins; ++b) {
      const size_t first = b * static_cast<size_t>(bin), end = std::min(steps.size(), first + static_cast<size_t>(bin));
      double loss = 0, norm = 0, ms = 0;
      for (size_t i = first; i < end; ++i) {
        loss += steps[i].loss / static_cast<double>(end - first);
        norm += steps[i].grad_norm / static_cast<double>(end - first);
        ms += steps[i].ms / static_cast<double>(end - first);
        if (steps[i].accuracy) accuracy.push_back({steps[i].step, *steps[i].accuracy});
      }
      const Step& last = steps[end - 1];
      EXPECT_EQ(columns["step"][b], last.step);
      EXPECT_EQ(columns["lr"][b], last.lr);
      EXPECT_NEAR(columns["loss"][b].get<double>(), loss, 1e-12);
      EXPECT_NEAR(columns["ms"][b].get<double>(), ms, 1e-6);
      EXPECT_EQ(columns["norm"][b].is_null(), !std::isfinite(norm)) << b;
      if (std::isfinite(norm)) {
        EXPECT_NEAR(columns["norm"][b].get<double>() / norm, 1, 1e-12);
      }
      for (size_t r = 0; r < 3; ++r) EXPECT_EQ(columns["memory"][r][b], last.rss_bytes[r]);
    }
    EXPECT_EQ(columns["accuracy"], accuracy);
  }
}

TEST(Words, OfTimesAndCountsAreRoundedWhereTheirUnitsMeet) {
  const std::pair<double, const char*> times[] = {{0, "0.0 s"},           {59.94, "59.9 s"},
                                                  {59.96, "1 min 00 s"},  {60.4, "1 min 00 s"},
                                                  {125, "2 min 05 s"},    {3599.4, "59 min 59 s"},
                                                  {3599.6, "1 h 00 min"}, {7259, "2 h 00 min"},
                                                  {7260, "2 h 01 min"},   {100 * 3600.0 + 59 * 60, "100 h 59 min"}};
  for (const auto& [seconds, text] : times) EXPECT_EQ(human_time(seconds), text) << seconds;
  const std::pair<int64_t, const char*> counts[] = {
      {0, "0"},       {999, "999"},      {1000, "1,000"},     {-1, "-1"},
      {-999, "-999"}, {-1000, "-1,000"}, {100000, "100,000"}, {999999999, "999,999,999"}};
  for (const auto& [count, text] : counts) EXPECT_EQ(human_count(count), text) << count;
}

// What a log says is what was; the largest rank's memory and a step that was left out are told.
TEST(Words, OfAStepAreReadAgainAndTellWhatIsUnusual) {
  for (const Step& step : run_of(20)) {
    const auto again = step_of(one_line(to_json(step)));
    ASSERT_TRUE(again);
    EXPECT_EQ(to_json(*again).dump(), to_json(step).dump());
    EXPECT_EQ(again->skipped, step.skipped);
    EXPECT_EQ(again->grad_norm, step.grad_norm);
  }
  Step step{.step = 3, .loss = 0.5, .grad_norm = 1, .ms = 20, .tokens_per_s = 1234.4};
  step.rss_bytes = {5'000'000, 90'000'000, 7'000'000};
  EXPECT_EQ(line(step, 300), "step   3/300  loss 0.50000  norm  1.0000     20.0 ms  1,234 tokens/s  90 MB");
  step.skipped = true;
  EXPECT_THAT(line(step, 300), testing::EndsWith("90 MB  skipped: a gradient was not finite"));
  for (const char* other : {"", "[]", "{}", "{\"step\": \"3\"}", "{\"steps\": 3}", "{\"step\": 3.5}", "{\"step\": 3"}) {
    EXPECT_FALSE(step_of(other)) << other;
  }
}

// A folder holds the page of its last run that ended, or none.
TEST(RunFolder, HasThePageOfTheRunThatIsInItWholeOrNotAtAll) {
  const fs::path path = fs::temp_directory_path() / ("plumb-page-" + std::to_string(getpid()));
  const auto steps = run_of(3);
  const auto has_page = [&] { return fs::exists(path / "report.html"); };
  {
    Folder folder(path);
    EXPECT_FALSE(fs::exists(path)) << "before the first step";
    for (const Step& step : steps) folder.add(to_json(step));
    folder.finish(steps, {{"steps", 3}});
  }
  EXPECT_TRUE(has_page());
  EXPECT_FALSE(fs::exists(path / "report.html.part"));
  std::ifstream log(path / "log.jsonl");
  const std::vector<std::string> lines{std::istream_iterator<std::string>(log), {}};
  EXPECT_EQ(lines.size(), 4u) << "every step and the summary";
  Folder next(path);
  EXPECT_TRUE(has_page()) << "until the next run has a step";
  next.add(to_json(steps[0]));
  EXPECT_FALSE(has_page());
  fs::create_directory(path / "report.html");  // which no file takes the place of
  EXPECT_THROW(next.finish(steps, {{"steps", 1}}), Error);
  EXPECT_FALSE(fs::exists(path / "report.html.part")) << "nothing of what failed";
  Folder none("");
  none.add(to_json(steps[0]));
  none.finish(steps, {});
  EXPECT_TRUE(none.go_on(5).empty());
  fs::remove_all(path);
}

}  // namespace

}  // namespace plumb::report

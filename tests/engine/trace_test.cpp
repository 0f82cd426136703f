// A trace holds what every rank did, on one clock, and says where the time of a step went.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "engine/spent.h"
#include "errors.h"
#include "unit/support/net.h"
#include "watch/timeline.h"
#include "world/clock.h"

namespace plumb {
namespace {

using scenarios::Alike;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "plumb-trace-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder for a test");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

Alike build() {
  static std::mutex building;
  const std::lock_guard lock(building);
  torch::manual_seed(7);
  return Alike(5);
}

void train(Engine& engine, Alike& net, int steps) {
  for (int step = 0; step < steps; ++step) {
    at::Tensor h = torch::ones({2, 6});
    for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
    h.sum().backward();
    engine.step();
    engine.zero_grad();
  }
}

// By rank and row, the names of its spans and marks.
using Rows = std::map<std::pair<int, std::string>, std::multiset<std::string>>;
Rows read(const std::string& path) {
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  Rows rows;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string kind = event.at("ph");
    if (kind == "M") continue;
    EXPECT_TRUE(kind == "X" || kind == "i") << event;
    EXPECT_GT(kind == "X" ? event.at("dur").get<double>() : 1.0, 0.0) << event;
    rows[{event.at("pid"), event.at("cat")}].insert(event.at("name"));
  }
  return rows;
}

class Traced : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Strategies, Traced, ::testing::Values("ddp", "zero1", "zero2", "zero3"));

TEST_P(Traced, HoldsWhatEveryRankDid) {
  const std::string strategy = GetParam();
  const Folder folder;
  constexpr int ranks = 2, steps = 3;
  run_local(ranks, [&](World world) {
    Alike net = build();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
    if (strategy == "zero3") engine.impl().units->gather_together(1);
    train(engine, net, 2);  // before it: none of this is in the trace
    Trace trace = engine.trace(folder / "steps.json");
    train(engine, net, steps);
    const std::vector<TimeSpent> spent = trace.stop();
    train(engine, net, 1);  // nor is this
    ASSERT_EQ(spent.size(), ranks);
    for (const TimeSpent& one : spent) {
      EXPECT_EQ(one.steps, steps);
      EXPECT_GT(one.compute, 0);
      EXPECT_GT(one.control, 0);
      EXPECT_GT(one.optimizer, 0);
      EXPECT_EQ(one.gathers > 0, strategy == "zero3");
      EXPECT_NEAR(one.step, one.compute + one.data + one.gathers + one.control + one.optimizer, 1e-9);
      ASSERT_EQ(one.waited_for.size(), ranks);
    }
    EXPECT_EQ(spent[static_cast<size_t>(world.rank())].waited_for[static_cast<size_t>(world.rank())], 0);
    EXPECT_EQ(trace.stop().size(), ranks);  // told again
  });
  const Rows rows = read(folder / "steps.json");
  for (int rank = 0; rank < ranks; ++rank) {
    const auto count = [&](const char* row, const std::string& name) {
      const auto found = rows.find({rank, row});
      return found == rows.end() ? 0 : static_cast<int>(found->second.count(name));
    };
    const auto all = [&](const char* row) {
      const auto found = rows.find({rank, row});
      return found == rows.end() ? 0 : static_cast<int>(found->second.size());
    };
    EXPECT_EQ(count("program", "forward"), 2 * steps);  // before the backward, and between it and the step
    EXPECT_EQ(count("program", "backward"), steps);
    EXPECT_EQ(count("program", "optimizer"), steps);
    EXPECT_EQ(count("program", "step"), 2 * steps);  // before the update and after it
    EXPECT_EQ(all("steps"), steps);
    EXPECT_EQ(count("steps", "step 2") + count("steps", "step 4"), 2);
    for (int layer = 0; layer < 5; ++layer) {
      EXPECT_EQ(count("gradients", "layer" + std::to_string(layer) + ".weight"), steps) << layer;
    }
    EXPECT_EQ(all("gradients"), 10 * steps);
    EXPECT_GE(all("buckets"), steps);
    EXPECT_EQ(all("control"), 2 * steps);  // a pass, a step
    EXPECT_EQ(all("gathers") > 0, strategy == "zero3");
  }
}

// Ranks that began at different times show one clock, for certain to within what is said of it.
TEST(Trace, RanksAreOnOneClock) {
  run_local(3, [](World world) {
    static std::atomic<int64_t> of_rank_zero{0};
    const auto origin = std::chrono::steady_clock::now() + milliseconds(5000 * world.rank());
    if (world.rank() == 0) of_rank_zero = nanoseconds(origin.time_since_epoch()).count();
    const Origin common = common_origin(world, origin);
    // Threads have one clock: the common origin is rank 0's own.
    const nanoseconds off = common.moment.time_since_epoch() - nanoseconds(of_rank_zero.load());
    EXPECT_LE(std::abs(off.count()), common.error.count());
    EXPECT_LT(common.error, milliseconds(4000));
  });
}

TEST(Trace, AFileThatCannotBeWrittenIsAnErrorOfEveryRank) {
  const Folder folder;
  const auto texts = test::errors(2, [&](World world) {
    Alike net = build();
    Engine engine(world, net, SGD{.lr = 0.1});
    try {
      const Trace trace = engine.trace(folder / "none/steps.json");
    } catch (const Error&) {
      train(engine, net, 1);  // the run may go on
      throw;
    }
  });
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    EXPECT_TRUE(texts[rank].starts_with("plumb: rank " + std::to_string(rank) + ": cannot write a trace to '"))
        << texts[rank];
  }
}

TEST(Trace, OneThatIsNotStoppedWritesNothing) {
  const Folder folder;
  run_local(2, [&](World world) {
    Alike net = build();
    Engine engine(world, net, SGD{.lr = 0.1});
    {
      Trace trace = engine.trace(folder / "steps.json");
      train(engine, net, 1);
    }
    EXPECT_FALSE(timeline_of(world).on());
    EXPECT_TRUE(timeline_of(world).events().empty());
    world.barrier();
    EXPECT_FALSE(std::filesystem::exists(folder / "steps.json"));
  });
}

// Names are the user's: whatever letters they have, the file is JSON.
TEST(Trace, HoldsNamesOfAnyLetters) {
  const Folder folder;
  const World world;
  at::Tensor weight = at::ones({3}).requires_grad_();
  Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{});
  Trace trace = engine.trace(folder / "names.json");
  timeline_of(engine.world()).mark(tracks::steps, "a \"quoted\" \\ and a\ttab, ä");
  const auto begin = std::chrono::steady_clock::now();
  timeline_of(engine.world()).span(tracks::data, "\\", begin, begin + milliseconds(2));
  trace.stop();
  const Rows rows = read(folder / "names.json");
  EXPECT_EQ(rows.at({0, "steps"}), std::multiset<std::string>{"a \"quoted\" \\ and a tab, ä"});
  EXPECT_EQ(rows.at({0, tracks::data}), std::multiset<std::string>{"\\"});
}

// Each trace has what began since its own beginning.
TEST(Trace, TwoAtATimeHoldWhatIsTheirs) {
  const Folder folder;
  run_local(2, [&](World world) {
    Alike net = build();
    Engine engine(world, net, SGD{.lr = 0.1});
    Trace outer = engine.trace(folder / "outer.json");
    train(engine, net, 2);
    Trace inner = engine.trace(folder / "inner.json");
    train(engine, net, 3);
    EXPECT_EQ(inner.stop()[0].steps, 3);
    train(engine, net, 1);
    EXPECT_EQ(outer.stop()[0].steps, 6);
    EXPECT_FALSE(timeline_of(world).on());
  });
  const Rows inner = read(folder / "inner.json"), outer = read(folder / "outer.json");
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(inner.at({rank, "steps"}).size(), 3u);
    EXPECT_EQ(outer.at({rank, "steps"}).size(), 6u);
  }
}

// Neither has anything that began before it did, nor are there holes in what the first one saw.
TEST(Trace, HoldsNothingThatBeganBeforeIt) {
  const Folder folder;
  Alike net = build();
  Engine engine(World(), net, SGD{.lr = 0.1});
  const auto program = [&](const std::string& name) {
    std::ifstream file(folder / name);
    const auto trace = nlohmann::json::parse(file);
    std::vector<std::pair<double, double>> spans;
    for (const auto& event : trace.at("traceEvents")) {
      if (event.at("ph") == "M") continue;
      EXPECT_GE(event.at("ts").get<double>(), 0) << name << ": " << event;
      if (event.at("cat") == tracks::program) spans.emplace_back(event.at("ts"), event.at("dur"));
    }
    return spans;
  };
  Trace outer = engine.trace(folder / "outer.json");
  train(engine, net, 1);
  Trace inner = engine.trace(folder / "inner.json");
  train(engine, net, 2);
  inner.stop();
  outer.stop();
  EXPECT_FALSE(program("inner.json").empty());
  const auto spans = program("outer.json");
  for (size_t i = 1; i < spans.size(); ++i) {
    EXPECT_NEAR(spans[i].first, spans[i - 1].first + spans[i - 1].second, 0.01) << "a program is always at something";
  }
}

TEST(Trace, OneThatIsNotStoppedLeavesTheFileThatWasThere) {
  const Folder folder;
  std::ofstream(folder / "steps.json") << "old";
  Alike net = build();
  Engine engine(World(), net, SGD{.lr = 0.1});
  {
    const Trace trace = engine.trace(folder / "steps.json");
    train(engine, net, 1);
  }
  std::string text;
  std::getline(std::ifstream(folder / "steps.json") >> std::ws, text);
  EXPECT_EQ(text, "old");
}

TEST(Trace, IsWrittenWhereItWasMeantAtTheCall) {
  const Folder here, there;
  const auto before = std::filesystem::current_path();
  Alike net = build();
  Engine engine(World(), net, SGD{.lr = 0.1});
  std::filesystem::current_path(here / "");
  Trace trace = engine.trace("steps.json");
  train(engine, net, 1);
  std::filesystem::current_path(there / "");
  trace.stop();
  std::filesystem::current_path(before);
  EXPECT_EQ(read(here / "steps.json").at({0, "steps"}).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(there / "steps.json"));
}

// A disk that is full, here a process that may write no long file: an error that says why, and the old trace is as it was.
TEST(Trace, OneThatCannotBeWrittenAtItsEndLeavesWhatWasThere) {
  const Folder folder;
  const std::string path = folder / "steps.json", link = folder / "link.json";
  std::ofstream(path) << "old";
  std::filesystem::create_symlink(path, link);
  Alike net = build();
  Engine engine(World(), net, SGD{.lr = 0.1});
  Trace trace = engine.trace(link);
  train(engine, net, 2);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{64, before.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &little);
  std::string said;
  try {
    trace.stop();
  } catch (const Error& error) {
    said = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_NE(said.find("cannot write the trace to '" + link + "': File too large"), std::string::npos) << said;
  std::string text;
  std::getline(std::ifstream(path) >> std::ws, text);
  EXPECT_EQ(text, "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".unfinished"));
  // There is room again.
  const auto spent = trace.stop();
  ASSERT_EQ(spent.size(), 1u);
  EXPECT_EQ(spent[0].steps, 2);
  EXPECT_EQ(read(path).at({0, "steps"}).size(), 2u);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
}

// Nothing can be made beside it, as in a folder of somebody else's (root may; here its name is taken): it is written itself.
TEST(Trace, IntoAFileThatNothingCanBeMadeBesideIsWrittenAsItLies) {
  const Folder folder;
  const std::string path = folder / "steps.json";
  std::ofstream(path) << "old, and longer than nothing";
  std::filesystem::create_directory(path + ".unfinished");
  Alike net = build();
  Engine engine(World(), net, SGD{.lr = 0.1});
  Trace trace = engine.trace(path);
  train(engine, net, 2);
  trace.stop();
  EXPECT_EQ(read(path).at({0, "steps"}).size(), 2u);
}

// ---- where time goes

const Timeline::Moment zero{};
Timeline::Moment at_ms(int64_t ms) { return zero + milliseconds(ms); }
Timeline::Event span(const char* track, const char* name, int64_t begin, int64_t end) {
  return {track, name, at_ms(begin), at_ms(end)};
}

TEST(TimeSpentOn, EveryMomentCountsOnce) {
  const std::vector<Timeline::Event> events = {
      span(tracks::program, doing::forward, 0, 100),
      span(tracks::gathers, "unit", 10, 20),
      span(tracks::program, doing::backward, 100, 300),
      span(tracks::data, "bucket 0", 250, 290),
      span(tracks::control, "the facts", 280, 300),  // both: counts as data until 290
      span(tracks::program, doing::step, 300, 320),
      span(tracks::program, doing::optimizer, 320, 400),
      span(tracks::data, "updated parameters", 370, 390),
      span(tracks::program, doing::step, 400, 410),
      span(tracks::steps, "step 0", 410, 410),
      span(tracks::program, "between steps", 410, 700),  // nothing of it counts
      span(tracks::control, "a message of the program's own", 500, 600),
  };
  const TimeSpent spent = time_spent(events, zero, 0, {""});
  EXPECT_EQ(spent.steps, 1);
  EXPECT_NEAR(spent.step, 0.410, 1e-9);
  EXPECT_NEAR(spent.gathers, 0.010, 1e-9);
  EXPECT_NEAR(spent.data, 0.060, 1e-9);
  EXPECT_NEAR(spent.control, 0.010, 1e-9);
  EXPECT_NEAR(spent.optimizer, 0.060, 1e-9);
  EXPECT_NEAR(spent.compute, 0.270, 1e-9);
  EXPECT_EQ(time_spent({}, zero, 0, {""}).step, 0);
}

TEST(TimeSpentOn, IsAMeanOverSteps) {
  std::vector<Timeline::Event> events;
  for (int64_t step = 0; step < 4; ++step) {
    events.push_back(span(tracks::program, doing::forward, 100 * step, 100 * step + 60));
    events.push_back(span(tracks::control, "facts", 100 * step + 50, 100 * step + 60));
    events.push_back(span(tracks::steps, "step", 100 * step + 60, 100 * step + 60));
  }
  const TimeSpent spent = time_spent(events, zero, 0, {""});
  EXPECT_NEAR(spent.step, 0.060, 1e-9);
  EXPECT_NEAR(spent.control, 0.010, 1e-9);
}

TEST(TimeSpentOn, WaitsAreForWhoCameLast) {
  const auto rank = [](int64_t facts, int64_t bucket) {
    return std::vector<Timeline::Event>{
        span(tracks::program, doing::backward, 0, 100), span(tracks::buckets, "bucket 0", bucket, 90),
        span(tracks::control, "the facts", facts, 62),  span(tracks::data, "bucket 0", 70, 90),
        span(tracks::steps, "step 0", 100, 100),
    };
  };
  const std::vector<std::vector<Timeline::Event>> ranks = {rank(20, 5), rank(60, 75), rank(30, 6)};
  std::vector<std::string> everybody;
  for (const auto& events : ranks) everybody.push_back(arrivals(events, zero));
  const TimeSpent first = time_spent(ranks[0], zero, 0, everybody);
  EXPECT_NEAR(first.waited_for[1], 0.040 + 0.005, 1e-9);  // 20 to 60 for its facts, 70 to 75 for its bucket
  EXPECT_EQ(first.waited_for[0] + first.waited_for[2], 0);
  const TimeSpent last = time_spent(ranks[1], zero, 1, everybody);
  EXPECT_EQ(last.waited_for, std::vector<double>(3));
  // What one rank alone did is no meeting.
  everybody[1] = "60000000 something else\n";
  EXPECT_EQ(time_spent(ranks[0], zero, 0, everybody).waited_for, std::vector<double>(3));
}

// Against a look at every millisecond: whatever lies inside of, across or beside whatever.
TEST(TimeSpentOn, IsWhatALookAtEveryMomentFinds) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 draw(seed);
    const auto below = [&](int64_t limit) { return static_cast<int64_t>(draw() % static_cast<unsigned>(limit)); };
    std::vector<Timeline::Event> events = {span(tracks::steps, "step 0", 90, 90)};
    std::vector<const char*> at(100, "");  // what counts, by millisecond; by the order of this list
    const std::vector<const char*> waits = {tracks::data, tracks::gathers, tracks::control};
    for (int64_t begin = 0; begin < 90;) {
      const auto end = std::min<int64_t>(90, begin + 1 + below(30));
      const char* what = std::vector{doing::forward, doing::backward, doing::step, doing::optimizer}[below(4)];
      events.push_back(span(tracks::program, what, begin, end));
      std::fill(at.begin() + begin, at.begin() + end, what == doing::optimizer ? what : "compute");
      begin = end + below(2) * below(10);
    }
    const std::vector<const char*> program = at;
    for (const char* track : {tracks::control, tracks::gathers, tracks::data}) {  // the last one said counts
      for (int64_t i = below(6); i > 0; --i) {
        const int64_t begin = below(80), end = begin + 1 + below(20);
        events.push_back(span(track, "wait", begin, end));
        for (int64_t ms = begin; ms < end; ++ms) at[ms] = *program[ms] == 0 ? "" : track;
      }
    }
    std::shuffle(events.begin(), events.end(), draw);
    const TimeSpent spent = time_spent(events, zero, 0, {""});
    const auto expected = [&](const char* what) {
      return 0.001 * static_cast<double>(std::count(at.begin(), at.end(), what));
    };
    ASSERT_NEAR(spent.data, expected(tracks::data), 1e-9) << seed;
    ASSERT_NEAR(spent.gathers, expected(tracks::gathers), 1e-9) << seed;
    ASSERT_NEAR(spent.control, expected(tracks::control), 1e-9) << seed;
    ASSERT_NEAR(spent.optimizer, expected(doing::optimizer), 1e-9) << seed;
    ASSERT_NEAR(spent.compute, expected("compute"), 1e-9) << seed;
  }
}

// A meeting of every step has one name: the second one is another meeting. So it is of gathers.
TEST(TimeSpentOn, WaitsOfEveryStepAreForWhoCameLastToThatOne) {
  for (const char* track : {tracks::control, tracks::buckets, "gathers"}) {
    const auto rank = [&](int64_t first, int64_t second) {
      return std::vector<Timeline::Event>{
          span(tracks::program, doing::backward, 0, 200), span(track, "the same", first, 60),
          span(track, "the same", second, 160),           span(tracks::data, "wait", 10, 60),
          span(tracks::data, "wait", 110, 160),           span(tracks::steps, "step 0", 100, 100),
          span(tracks::steps, "step 1", 200, 200),
      };
    };
    const std::vector<std::vector<Timeline::Event>> ranks = {rank(10, 110), rank(50, 105), rank(5, 140)};
    std::vector<std::string> everybody;
    for (const auto& events : ranks) everybody.push_back(arrivals(events, zero));
    const TimeSpent first = time_spent(ranks[0], zero, 0, everybody);
    EXPECT_NEAR(first.waited_for[1], 0.040 / 2, 1e-9) << track;
    EXPECT_NEAR(first.waited_for[2], 0.030 / 2, 1e-9) << track;
  }
}

// A rank's own update waits for nobody, whoever comes to a meeting meanwhile.
TEST(TimeSpentOn, AnUpdateIsNoWait) {
  const std::vector<Timeline::Event> events = {
      span(tracks::program, doing::backward, 0, 50), span(tracks::program, doing::optimizer, 50, 100),
      span(tracks::control, "facts", 10, 30), span(tracks::steps, "step 0", 100, 100)};
  const std::vector<Timeline::Event> other = {span(tracks::control, "facts", 20, 30),
                                              span(tracks::buckets, "bucket 0", 80, 90)};
  std::vector<Timeline::Event> mine = events;
  mine.push_back(span(tracks::buckets, "bucket 0", 60, 90));
  const TimeSpent spent = time_spent(mine, zero, 0, {arrivals(mine, zero), arrivals(other, zero)});
  EXPECT_NEAR(spent.optimizer, 0.050, 1e-9);
  EXPECT_NEAR(spent.waited_for[1], 0.010, 1e-9) << "for its facts";
}

}  // namespace
}  // namespace plumb

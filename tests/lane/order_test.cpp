// Lanes, as properties of every program: whoever must be waited for is, and nobody else. Judged by the clocks of the
// simulated accelerator's streams against what the contract says, and by counting events.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "lane/lane.h"
#include "plumb/sim.h"
#include "sim/machine.h"

namespace plumb {
namespace {

// Work on several streams of one device, and what each stream's next operation comes after.
class Streams {
 public:
  explicit Streams(int count) : session_(1) {
    streams_.push_back(sim::current_stream(0));
    while (static_cast<int>(streams_.size()) < count) streams_.push_back(sim::new_stream(0));
    for (int i = 0; i < count; ++i) work(i);
  }

  int count() const { return static_cast<int>(streams_.size()); }
  c10::Device device() const { return sim::device(0); }
  const c10::Stream& operator[](int index) const { return streams_[index]; }
  // One operation of a stream; its number.
  uint32_t work(int index) {
    const auto lock = sim::Machine::lock();
    sim::Machine::get().enqueue(id(index), sim::intern("use"), {}, [] {});
    return sim::Machine::get().clock_of(id(index)).now(id(index));
  }
  // By stream: how many of its operations come before whatever stream `index` is given next.
  std::vector<uint32_t> known(int index) const {
    const auto lock = sim::Machine::lock();
    std::vector<uint32_t> numbers;
    for (int other = 0; other < count(); ++other)
      numbers.push_back(sim::Machine::get().clock_of(id(index)).now(id(other)));
    return numbers;
  }
  uint64_t events() const { return session_.statistics().events; }
  uint64_t waits() const { return session_.statistics().stream_waits; }

 private:
  int id(int index) const { return sim::Machine::get().id_of(streams_[index]); }

  sim::Session session_;
  std::vector<c10::Stream> streams_;
};

struct Use {
  int stream = 0;
  uint32_t number = 0;
};

// Runs `wait` under stream `index` and checks that it then comes after each of `before`, that it asked nobody but the
// streams of `before`, each once (twice, where one is both what came `first` and what came since), and that no other
// stream learnt anything.
void expect_order(Streams& streams, int index, const std::optional<Use>& first, std::vector<Use> before,
                  const std::function<void()>& wait) {
  std::vector<std::vector<uint32_t>> was;
  for (int i = 0; i < streams.count(); ++i) was.push_back(streams.known(i));
  std::set<int> others;
  for (const Use& use : before) others.insert(use.stream);
  others.erase(index);
  uint64_t expected = others.size();
  if (first) {
    before.push_back(*first);
    if (first->stream != index) {
      others.insert(first->stream);
      ++expected;
    }
  }
  const uint64_t waits = streams.waits(), events = streams.events();
  {
    const c10::StreamGuard guard(streams[index]);
    wait();
  }
  const std::vector<uint32_t> now = streams.known(index);
  for (const Use& use : before) RC_ASSERT(now[use.stream] >= use.number);
  std::vector<uint32_t> most = was[index];
  for (const int other : others) {
    for (int i = 0; i < streams.count(); ++i) most[i] = std::max(most[i], was[other][i]);
  }
  for (int i = 0; i < streams.count(); ++i) RC_ASSERT(now[i] <= most[i]);
  for (int i = 0; i < streams.count(); ++i) RC_ASSERT(i == index || streams.known(i) == was[i]);
  RC_ASSERT(streams.waits() - waits == expected);
  RC_ASSERT(streams.events() - events <= expected);
}

TEST(Order, OfAnyUsesIsWhatTheContractAsksForAndNoMore) {
  EXPECT_TRUE(rc::check("uses of parts, places and all", [] {
    Streams streams(*rc::gen::inRange(1, 5));
    Lanes lanes;
    std::optional<Use> all;       // the last use of all
    std::vector<Use> parts;       // since then
    std::map<int, Use> of_place;  // of those, the last of each place
    const int length = *rc::gen::inRange(1, 40);
    for (int i = 0; i < length; ++i) {
      const int stream = *rc::gen::inRange(0, streams.count());
      const int kind = *rc::gen::element(0, 1, 1, 2, 2, 3, 4);
      const int place = *rc::gen::inRange(0, 3);
      std::vector<Use> before;
      if (kind == 2 && of_place.contains(place)) before.push_back(of_place.at(place));
      if (kind == 3) before.insert(before.end(), parts.begin(), parts.end());
      if (kind == 0) {
        streams.work(stream);  // of something else
        continue;
      }
      if (kind == 4) {
        lanes = Lanes();  // other memory
        all.reset();
        parts.clear();
        of_place.clear();
        continue;
      }
      expect_order(streams, stream, all, before, [&] {
        if (kind == 1) lanes.begin_part(streams.device());
        if (kind == 2) lanes.begin_part(streams.device(), place);
        if (kind == 3) lanes.begin_all(streams.device());
      });
      const Use use{stream, streams.work(stream)};
      const c10::StreamGuard guard(streams[stream]);
      if (kind == 1) lanes.end_part(streams.device());
      if (kind == 2) lanes.end_part(streams.device(), place);
      if (kind == 3) lanes.end_all(streams.device());
      if (kind == 3) {
        all = use;
        parts.clear();
        of_place.clear();
      } else {
        parts.push_back(use);
        if (kind == 2) of_place[place] = use;
      }
    }
  }));
}

TEST(Order, OfASetIsThatOfItsMembers) {
  EXPECT_TRUE(rc::check("sets that join, follow, and are cleared", [] {
    Streams streams(*rc::gen::inRange(1, 5));
    LaneSet set;
    std::map<int, Use> members;
    const int length = *rc::gen::inRange(1, 40);
    for (int i = 0; i < length; ++i) {
      const int stream = *rc::gen::inRange(0, streams.count());
      const auto each = [&] {
        std::vector<Use> uses;
        for (const auto& [index, use] : members) uses.push_back(use);
        return uses;
      };
      switch (*rc::gen::inRange(0, 6)) {
        case 0:
        case 1: {
          members[stream] = {stream, streams.work(stream)};
          const c10::StreamGuard guard(streams[stream]);
          set.add(streams.device());
          break;
        }
        case 2:
          expect_order(streams, stream, {}, each(), [&] { set.join(streams.device()); });
          break;
        case 3: {
          const int other = *rc::gen::inRange(0, streams.count());
          std::vector<Use> one;
          if (members.contains(other)) one.push_back(members[other]);
          expect_order(streams, stream, {}, one, [&] { set.join(streams.device(), streams[other]); });
          break;
        }
        case 4: {
          std::vector<std::vector<uint32_t>> expected;
          uint64_t others = 0;
          for (int other = 0; other < streams.count(); ++other) {
            expected.push_back(streams.known(other));
            if (other == stream || !members.contains(other)) continue;
            ++others;
            const std::vector<uint32_t> from = streams.known(stream);
            for (int k = 0; k < streams.count(); ++k) expected[other][k] = std::max(expected[other][k], from[k]);
          }
          const uint64_t waits = streams.waits(), events = streams.events();
          const c10::StreamGuard guard(streams[stream]);
          set.follow(streams.device());
          for (int other = 0; other < streams.count(); ++other) RC_ASSERT(streams.known(other) == expected[other]);
          RC_ASSERT(streams.waits() - waits == others);
          RC_ASSERT(streams.events() - events == std::min<uint64_t>(others, 1));
          break;
        }
        default:
          if (*rc::gen::inRange(0, 3) > 0) break;
          set.clear();
          members.clear();
      }
    }
  }));
}

TEST(Order, OnOneStreamRecordsNoEvent) {
  Streams streams(3);
  LaneSet set;
  Lanes lanes;
  for (const int stream : {0, 1}) {
    const c10::StreamGuard guard(streams[stream]);
    Lanes own;
    set.clear();
    for (int i = 0; i < 5; ++i) {
      set.add(streams.device());
      set.join(streams.device());
      set.follow(streams.device());
      own.begin_part(streams.device(), i % 2);
      own.end_part(streams.device(), i % 2);
      own.begin_part(streams.device());
      own.end_part(streams.device());
      const Alone alone(own, streams.device());
    }
  }
  EXPECT_EQ(streams.events(), 0u);
  EXPECT_EQ(streams.waits(), 0u);
}

TEST(Order, OfManyBehindOneTakesOneEvent) {
  Streams streams(4);
  LaneSet set;
  set.add(streams.device());
  for (const int stream : {1, 2, 3, 1}) {
    const c10::StreamGuard guard(streams[stream]);
    set.join(streams.device());
  }
  EXPECT_EQ(streams.events(), 1u);
  EXPECT_EQ(streams.waits(), 4u);
  set.add(streams.device());  // more work, another event
  const c10::StreamGuard guard(streams[1]);
  set.join(streams.device());
  EXPECT_EQ(streams.events(), 2u);
}

// ---- Capture. The simulated device cannot; the test says which streams are.

std::map<c10::StreamId, uint64_t> graphs;

class Captured : public testing::Test {
 protected:
  void SetUp() override {
    graphs.clear();
    ask_about_graphs([](const c10::Stream& stream) { return graphs.contains(stream.id()) ? graphs[stream.id()] : 0; });
  }
  void TearDown() override { ask_about_graphs(nullptr); }

  void capture(int stream, uint64_t graph) { graphs[streams[stream].id()] = graph; }
  void add(int stream) {
    const c10::StreamGuard guard(streams[stream]);
    set.add(streams.device());
  }
  // How many events were recorded and waits made by that.
  std::pair<uint64_t, uint64_t> join(int stream) {
    const uint64_t events = streams.events(), waits = streams.waits();
    const c10::StreamGuard guard(streams[stream]);
    set.join(streams.device());
    return {streams.events() - events, streams.waits() - waits};
  }
  std::pair<uint64_t, uint64_t> follow(int stream) {
    const uint64_t events = streams.events(), waits = streams.waits();
    const c10::StreamGuard guard(streams[stream]);
    set.follow(streams.device());
    return {streams.events() - events, streams.waits() - waits};
  }
  using Pair = std::pair<uint64_t, uint64_t>;

  Streams streams{4};
  LaneSet set;
};

TEST_F(Captured, StreamsAreKnown) {
  EXPECT_FALSE(capturing(streams.device()));
  capture(0, 7);
  EXPECT_TRUE(capturing(streams.device()));
  EXPECT_FALSE(capturing(at::kCPU));
  const c10::StreamGuard guard(streams[1]);
  EXPECT_FALSE(capturing(streams.device()));
}

TEST_F(Captured, StreamsDoNotReachOutOfTheirGraph) {
  add(0);
  capture(1, 7);
  EXPECT_EQ(join(1), Pair(0, 0)) << "what ran before the capture has ended";
  EXPECT_EQ(follow(1), Pair(0, 0)) << "streams outside wait for no captured work";
}

TEST_F(Captured, StreamsWaitForEachOtherInsideTheGraph) {
  add(0);
  capture(0, 7);
  EXPECT_EQ(join(1), Pair(1, 1)) << "by that, it joins the capture";
  capture(1, 7);
  EXPECT_EQ(join(2), Pair(0, 1)) << "the event is of this graph";
  EXPECT_EQ(follow(1), Pair(1, 1));
}

// Those that take no part in it would be pulled into the graph, and the capture could not end.
TEST_F(Captured, StreamsThatRunAreNotMadeToFollowAGraph) {
  for (const int stream : {0, 1, 2}) add(stream);
  capture(0, 7);
  capture(2, 7);
  EXPECT_EQ(follow(2), Pair(1, 1)) << "the other one that is captured, alone";
  graphs.clear();
  EXPECT_EQ(follow(2), Pair(1, 2));
  capture(1, 7);
  EXPECT_EQ(follow(2), Pair(1, 2)) << "what runs may be waited for by what is captured";
}

// A wait inside of the graph, one outside with nothing new, and again: an event of a graph is none of the stream's.
TEST_F(Captured, EventsOfAGraphAreNotTakenForThoseThatRan) {
  add(0);
  for (const uint64_t graph : {7, 8}) {
    capture(0, graph);
    EXPECT_EQ(join(1), Pair(1, 1)) << "inside of graph " << graph;
    EXPECT_EQ(join(2), Pair(0, 1)) << "the same event, of this graph";
    graphs.clear();
    EXPECT_EQ(join(1), Pair(1, 1)) << "after graph " << graph;
    EXPECT_EQ(join(2), Pair(0, 1)) << "after graph " << graph;
  }
}

TEST_F(Captured, EventsAreOfOneGraphOnly) {
  add(0);
  EXPECT_EQ(join(1), Pair(1, 1));
  capture(0, 7);
  EXPECT_EQ(join(2), Pair(1, 1)) << "an event that was recorded before the capture is none of the graph's";
  graphs.clear();
  EXPECT_EQ(join(1), Pair(1, 1)) << "an event of the graph means nothing outside";
  EXPECT_EQ(join(2), Pair(0, 1));
  capture(0, 8);
  EXPECT_EQ(join(1), Pair(1, 1));
  capture(0, 9);
  EXPECT_EQ(join(1), Pair(1, 1)) << "nor inside another";
}

}  // namespace
}  // namespace plumb

// Reports over a store: everybody's latest word, who beats, what was sent for it, and last words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <thread>

#include "plumb/error.h"
#include "watch/report_channel.h"
#include "world/rendezvous.h"
#include "world/support/threads.h"

namespace plumb::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Channel = std::unique_ptr<ReportChannel>;

// Counts what is asked of it, from any thread, and fails from the moment that it is told to.
class Counting final : public c10d::PrefixStore {
 public:
  explicit Counting(StorePtr store) : PrefixStore("", std::move(store)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { ask(), PrefixStore::set(key, value); }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    return ask(), PrefixStore::multiGet(keys);
  }
  bool check(const std::vector<std::string>& keys) override { return ask(), PrefixStore::check(keys); }
  StorePtr clone() override { throw std::runtime_error("the channel keeps this one"); }
  std::atomic<int64_t> asked{0};
  std::atomic<bool> broken{false};

 private:
  void ask() {
    if (broken) throw std::runtime_error("connection reset\nframe 1");
    ++asked;
  }
};

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

bool soon(const std::function<bool()>& truth) {
  for (int i = 0; i < 10'000 && !truth(); ++i) std::this_thread::sleep_for(milliseconds(1));
  return truth();
}

Report waiting() {
  Report report;
  report.state = Report::State::waiting;
  report.where = {Where::Kind::step, 4, 1, "x"};
  report.ticket.number = 9;
  return report;
}

// Both channels of two ranks over one store.
struct Two {
  explicit Two(Clock::time_point contestable = {}, StoreHost host = StoreHost::elsewhere) {
    expect_all_well(on_threads(2, [&](int rank) {
      channel[rank] = make_store_channel(store, rank, 2, progress[rank], seconds(60),
                                         rank == 0 ? host : StoreHost::elsewhere, contestable);
    }));
  }
  Report of(int rank) {
    const auto heard = channel[1 - rank]->read(seconds(20));
    return heard ? heard->at(rank).report : Report{};
  }
  c10::intrusive_ptr<Counting> store = c10::make_intrusive<Counting>(c10::make_intrusive<c10d::HashStore>());
  std::shared_ptr<Progress> progress[2] = {std::make_shared<Progress>(0), std::make_shared<Progress>(1)};
  Channel channel[2];
};

TEST(StoreChannel, TellsEverybodysLatestWordAndProgress) {
  Two two;
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(two.channel[rank]->beats());
    EXPECT_EQ(two.channel[rank]->trouble(), "");
    EXPECT_EQ(two.channel[rank]->objection(), nullptr);
    EXPECT_EQ(two.of(rank).state, Report::State::running);
    two.progress[rank]->issued[control_index] = 7 + rank;
    two.progress[rank]->road.pass(Point::gather, 4, 1, 2 + rank);
    two.channel[rank]->publish(waiting());
    ASSERT_TRUE(soon([&] { return two.of(rank).state == Report::State::waiting; }));
    const Report heard = two.of(rank);
    EXPECT_EQ(heard.issued[control_index], 7 + rank);
    EXPECT_EQ(heard.issued[data_index], 0);
    EXPECT_EQ(heard.last.point, Point::gather);
    EXPECT_EQ(heard.last.index, 2 + rank);
    EXPECT_EQ(describe(heard.where), "step() number 4 after 1 backward (x)");
    EXPECT_EQ(heard.ticket.number, 9);
    two.channel[rank]->publish(Report{});
    EXPECT_TRUE(soon([&] { return two.of(rank).state == Report::State::running; })) << "the next beat tells it";
  }
}

TEST(StoreChannel, BeatsWhileItsProcessLivesAndSaysWhenOneWasHeardOf) {
  Two two;
  const int64_t first = two.of(1).beat;
  EXPECT_TRUE(soon([&] { return two.of(1).beat > first; }));
  const auto heard = *two.channel[0]->read(seconds(20));
  EXPECT_NE(heard[1].changed, Clock::time_point{});
  two.channel[1].reset();  // beats no more
  const auto last = *two.channel[0]->read(seconds(20));
  EXPECT_GE(last[1].changed, heard[1].changed);
  std::this_thread::sleep_for(milliseconds(20));
  const auto later = *two.channel[0]->read(seconds(20));
  EXPECT_EQ(later[1].changed, last[1].changed);
  EXPECT_GT(later[0].changed, last[0].changed) << "its own still does";
  EXPECT_EQ(later[1].report.beat, last[1].report.beat);
}

// Whatever a rank publishes, and however often: who hears a lower number, or the same, takes it for dead.
TEST(StoreChannel, ABeatNeverComesAgain) {
  Two two;
  for (int i = 0; i < 30; ++i) (void)two.channel[1]->read(seconds(20));  // each is a beat of its own
  int64_t last = two.of(1).beat;
  for (int i = 0; i < 8; ++i) {
    two.channel[1]->publish(i % 2 == 0 ? waiting() : Report{});
    (void)two.channel[1]->read(seconds(20));
    const int64_t now = two.of(1).beat;
    EXPECT_GT(now, last) << "after " << i + 1 << " reports";
    last = now;
  }
}

// As many as the server was really sent.
TEST(StoreChannel, CountsItsMessages) {
  for (const bool contestable : {false, true}) {
    Two two(contestable ? Clock::now() + seconds(600) : Clock::time_point{});
    // But for the first report of each, and for the word that all have reported.
    const auto counted = [&] {
      return two.store->asked - two.channel[0]->messages() - two.channel[1]->messages() == 3;
    };
    for (int i = 0; i < 40; ++i) two.of(i % 2);
    EXPECT_TRUE(soon(counted)) << "each read is two messages, each beat one, each look for an objection one more";
  }
}

TEST(StoreChannel, TheLastWordStays) {
  Two two;
  Report failed;
  failed.state = Report::State::failed;
  failed.message = "it broke";
  two.channel[1]->publish(failed);
  two.channel[1]->publish(waiting());
  two.channel[1]->leave();
  EXPECT_EQ(two.of(1).state, Report::State::failed);
  EXPECT_EQ(two.of(1).message, "it broke");
  two.channel[0]->leave();
  two.channel[0]->leave();  // once is enough
  EXPECT_EQ(two.of(0).state, Report::State::left);
  Two dropped;
  dropped.channel[0].reset();
  EXPECT_EQ(dropped.of(0).state, Report::State::left) << "its end is a leave";
}

// Whoever serves the store keeps it until the others have said their last words.
TEST(StoreChannel, ItsHostLeavesLast) {
  for (const auto host : {StoreHost::here, StoreHost::elsewhere}) {
    Two two({}, host);
    std::atomic<bool> leaves{false};
    std::thread other([&] {
      if (host == StoreHost::here) std::this_thread::sleep_for(milliseconds(150));
      leaves = true;
      two.channel[1]->leave();
    });
    if (host == StoreHost::elsewhere) other.join();
    two.channel[0]->leave();
    EXPECT_TRUE(leaves);
    if (other.joinable()) other.join();
  }
}

TEST(StoreChannel, AStoreThatBreaksIsTroubleInItsFirstLine) {
  Two two;
  two.store->broken = true;
  EXPECT_TRUE(soon([&] { return !two.channel[0]->read(seconds(20)); }));
  EXPECT_EQ(two.channel[0]->trouble(), "connection reset");
  EXPECT_FALSE(two.channel[0]->read(seconds(20))) << "at once";
}

TEST(StoreChannel, AClaimThatComesLateIsAnObjectionWhileItIsContestable) {
  Two open(Clock::now() + seconds(600)), closed(Clock::now() - seconds(1));
  for (Two* two : {&open, &closed}) two->store->set("objection", bytes_of("two claim number 1"));
  EXPECT_TRUE(soon([&] { return open.channel[0]->objection() != nullptr; }));
  ASSERT_NE(open.channel[0]->objection(), nullptr);
  EXPECT_EQ(*open.channel[0]->objection(), "two claim number 1");
  const int64_t before = closed.of(1).beat;
  EXPECT_TRUE(soon([&] { return closed.of(1).beat > before + 1; }));
  EXPECT_EQ(closed.channel[0]->objection(), nullptr);
}

TEST(StoreChannel, WhoDoesNotReportIsNamedByEveryOther) {
  for (int missing = 0; missing < 3; ++missing) {
    const StorePtr store = c10::make_intrusive<c10d::HashStore>();
    const auto thrown = on_threads(3, [&](int rank) {
      if (rank == missing) return;
      make_store_channel(store, rank, 3, std::make_shared<Progress>(rank), seconds(1), StoreHost::elsewhere);
    });
    for (int r = 0; r < 3; ++r) {
      if (r == missing) continue;
      EXPECT_THAT(thrown[r], StartsWith("plumb: rank " + std::to_string(r) +
                                        ": waited 1.00 s for all 3 ranks to join, and did not hear of rank " +
                                        std::to_string(missing) + ";"));
    }
  }
}

// ---- who takes part

Place place(int rank, int size) {
  Place place;
  place.rank = rank;
  place.size = size;
  return place;
}

std::vector<std::string> settled(const std::vector<Place>& places, milliseconds limit) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  return on_threads(static_cast<int>(places.size()),
                    [&](int i) { Rendezvous(places[static_cast<size_t>(i)], store, limit).settle(); });
}

TEST(Settling, EndsWellWhereEveryNumberIsClaimedOnce) {
  for (int size = 1; size <= 5; ++size) {
    std::vector<Place> places;
    for (int r = 0; r < size; ++r) places.push_back(place((r + 2) % size, size));
    expect_all_well(settled(places, seconds(60)));
  }
}

TEST(Settling, NamesEverybodyWhoDidNotCome) {
  const auto thrown = settled({place(0, 5), place(3, 5)}, seconds(1));
  EXPECT_THAT(thrown[0], StartsWith("plumb: rank 0: waited 1.00 s for all 5 ranks to join, and did not hear of rank 1, "
                                    "rank 2, rank 4; see whether they started"));
  EXPECT_THAT(thrown[1], StartsWith("plumb: rank 3: waited 1.00 s for all 5 ranks to join, and did not hear of rank 1, "
                                    "rank 2, rank 4;"));
  EXPECT_THAT(settled({place(1, 3), place(2, 3)}, seconds(1)), ::testing::Each(HasSubstr("did not hear of rank 0;")));
}

// However the time goes: what was waited for rank 0 is not waited for the others once more.
TEST(Settling, HasOneTimeForAllOfItsWaits) {
  struct Slow : c10d::HashStore {
    using c10d::HashStore::wait;
    std::vector<milliseconds> asked;
    void wait(const std::vector<std::string>&, const milliseconds& timeout) override {
      asked.push_back(timeout);
      std::this_thread::sleep_for(milliseconds(300));
      if (asked.size() > 1) throw std::runtime_error("nobody came");
    }
  };
  const auto store = c10::make_intrusive<Slow>();
  store->set("claim/0", bytes_of("0\n3\n1\nWORLD_SIZE=3\nhost\n\n"));
  EXPECT_THROW(Rendezvous(place(1, 3), StorePtr(store), seconds(60)).settle(), Error);
  ASSERT_EQ(store->asked.size(), 2u);
  EXPECT_LE(store->asked[0], seconds(60));
  EXPECT_LE(store->asked[1], milliseconds(59'700));
}

// Everybody hears both claims, by the numbers of their ranks.
TEST(Settling, TwoSizesEndItForAllOfThem) {
  Place other = place(1, 3);
  other.size_variable = "SLURM_NTASKS";
  const auto thrown = settled({place(0, 2), other}, milliseconds(3'000));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(thrown[i], ::testing::AllOf(StartsWith("plumb: rank " + std::to_string(i) +
                                                       ": ranks were told worlds of different "
                                                       "sizes: WORLD_SIZE=2 on rank 0 (process "),
                                            HasSubstr("), but SLURM_NTASKS=3 on rank 1 (process ")));
  }
}

// A stranger is refused alone, and named where it came instead of one that is missing.
TEST(Settling, OneOfAnotherJobIsRefusedAlone) {
  Place zero = place(0, 2), one = place(1, 2), stranger = place(1, 2);
  zero.job = one.job = "job 7";
  stranger.job = "job 8";
  const auto missing = settled({zero, stranger}, seconds(1));
  EXPECT_THAT(missing[1],
              ::testing::AllOf(HasSubstr("plumb: rank 1: "), HasSubstr("is where another job meets: rank 0 "),
                               HasSubstr(" is of job 7, and this one (process "), HasSubstr(") of job 8;")));
  EXPECT_THAT(missing[0], ::testing::AllOf(HasSubstr("did not hear of rank 1;"),
                                           HasSubstr("one of another job came instead (rank 1 (process "),
                                           HasSubstr(") of job 8)")));
  const auto well = settled({zero, one, stranger}, seconds(20));
  EXPECT_EQ(well[0], "");
  EXPECT_EQ(well[1], "");
  EXPECT_THAT(well[2], HasSubstr("is where another job meets"));
  Place nameless = place(1, 2);
  expect_all_well(settled({zero, nameless}, seconds(20)));
}

}  // namespace
}  // namespace plumb::testing

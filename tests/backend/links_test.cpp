// Rounds of messages: what the scripts bring for every number of ranks, whoever drives them; which calls never mix; and how
// they end when a message cannot come.
#include "backend/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <future>
#include <thread>

#include "backend/support/local_ranks.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using namespace test;
using ::testing::HasSubstr;

// A message that may be given up, as gloo's may; it is nobody's then.
class Message final : public c10d::Work {
 public:
  explicit Message(test::Work inner) : inner_(std::move(inner)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(milliseconds timeout) override { return inner_->wait(timeout); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  void abort() override {}

 private:
  test::Work inner_;
};

// The messages of a local backend under another's name: whoever sees "gloo" must not ask it whether one has come.
class Disguised final : public c10d::Backend {
 public:
  Disguised(test::Backend inner, std::string name)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }
  Work send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return c10::make_intrusive<Message>(inner_->send(tensors, to, tag));
  }
  Work recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return c10::make_intrusive<Message>(inner_->recv(tensors, from, tag));
  }

 private:
  test::Backend inner_;
  std::string name_;
};

// The links of all ranks of one group, in one thread.
struct Linked {
  Linked(int size, const std::string& name, Cargo cargo = Cargo::control) : ranks(size) {
    for (int r = 0; r < size; ++r) {
      wires.push_back(std::make_shared<Wire>());
      all.push_back(
          std::make_unique<Links>(c10::make_intrusive<Disguised>(ranks.all[r], name), issuing, wires.back(), cargo));
    }
  }
  Ranks ranks;
  std::mutex issuing;
  std::vector<std::shared_ptr<Wire>> wires;
  std::vector<std::unique_ptr<Links>> all;
};

// Moves those on that move only when they are asked. Whether all have ended.
bool settled(const std::vector<Work>& works) {
  for (int i = 0; i < 5'000; ++i) {
    bool all = true;
    for (const Work& work : works) all = work->isCompleted() && all;
    if (all) return true;
    if (i > 100) std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

void expect_ended(const std::vector<Work>& works) {
  ASSERT_TRUE(settled(works));
  for (const Work& work : works) EXPECT_EQ(outcome(work, milliseconds(20'000)), "");
}

int64_t log2_up(int ranks) { return std::bit_width(static_cast<unsigned>(ranks - 1)); }

class Scripts : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Links, Scripts, ::testing::Values("local", "gloo"));

TEST_P(Scripts, SpreadEverybodysBlockInLogarithmicRounds) {
  for (int size = 1; size <= 9; ++size) {
    for (const int64_t block : {1, 3}) {
      Linked linked(size, GetParam());
      std::vector<Work> works;
      std::vector<at::Tensor> blocks;
      for (int r = 0; r < size; ++r) {
        blocks.push_back(at::full({size * block}, -1.0));
        const at::Tensor mine = at::arange(block).to(at::kFloat) + 10 * r;
        works.push_back(linked.all[r]->start(spread(r, size, mine, blocks[r]), 7));
      }
      expect_ended(works);
      for (int r = 0; r < size; ++r) {
        for (int from = 0; from < size; ++from) {
          EXPECT_TRUE(blocks[r].narrow(0, from * block, block).equal(at::arange(block).to(at::kFloat) + 10 * from))
              << "of rank " << from << " at rank " << r << " of " << size;
        }
        const Wire::Count sent = linked.wires[r]->counts()[static_cast<size_t>(Cargo::control)];
        EXPECT_EQ(sent.rounds, log2_up(size));
        EXPECT_EQ(sent.messages, log2_up(size));
        EXPECT_EQ(sent.bytes, 4 * block * (size - 1));
      }
    }
  }
}

TEST_P(Scripts, CombineEverybodysToTheSameBitsOnEveryRank) {
  for (int size = 1; size <= 9; ++size) {
    Linked linked(size, GetParam());
    std::vector<Work> works;
    std::vector<at::Tensor> sums;
    at::Tensor plain = at::zeros({5}, at::kDouble);
    int64_t others = 0;  // beyond a power of two
    while (std::has_single_bit(static_cast<unsigned>(size - others)) == false) ++others;
    for (int r = 0; r < size; ++r) {
      sums.push_back(at::arange(1, 6).to(at::kDouble).pow(-r - 1) / 3);
      plain += sums[r];
    }
    for (int r = 0; r < size; ++r) {
      works.push_back(linked.all[r]->start(
          combination(r, size, sums[r], [mine = sums[r]](const at::Tensor& o) { mine.add_(o); }), 7));
    }
    expect_ended(works);
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(sums[r].equal(sums[0])) << "rank " << r << " of " << size;
      EXPECT_TRUE(at::allclose(sums[r], plain, 1e-12)) << "rank " << r << " of " << size;
      const Wire::Count sent = linked.wires[r]->counts()[static_cast<size_t>(Cargo::control)];
      const int64_t doubling = log2_up(static_cast<int>(size - others));
      EXPECT_EQ(sent.messages, r >= size - others ? 1 : doubling + (r < others ? 1 : 0));
      EXPECT_EQ(sent.bytes, 40 * sent.messages);
    }
  }
}

TEST_P(Scripts, GatherEveryShardInOneRound) {
  for (int size = 1; size <= 9; ++size) {
    for (const bool in_place : {false, true}) {
      Linked linked(size, GetParam(), Cargo::gather);
      std::vector<Work> works;
      std::vector<at::Tensor> wholes;
      for (int r = 0; r < size; ++r) {
        wholes.push_back(at::full({size * 2}, -1));
        const at::Tensor shard = in_place ? wholes[r].narrow(0, 2 * r, 2) : at::empty({2}, at::kLong);
        shard[0] = 10 * r;
        shard[1] = 10 * r + 1;
        works.push_back(linked.all[r]->start(direct_gather(r, size, wholes[r], shard), 7));
      }
      expect_ended(works);
      for (int r = 0; r < size; ++r) {
        for (int64_t i = 0; i < 2 * size; ++i) EXPECT_EQ(wholes[r][i].item<int64_t>(), i / 2 * 10 + i % 2);
        const Wire::Count sent = linked.wires[r]->counts()[static_cast<size_t>(Cargo::gather)];
        EXPECT_EQ(sent.rounds, size > 1 ? 1 : 0);
        EXPECT_EQ(sent.messages, size - 1);
        EXPECT_EQ(sent.bytes, 16 * (size - 1));
      }
    }
  }
}

// Many calls under way, all about the same: the how manieth it is keeps them apart.
TEST_P(Scripts, OfManyCallsUnderWayEachEndsWithItsOwn) {
  constexpr int size = 3, calls = 200;
  Linked linked(size, GetParam());
  std::vector<Work> works;
  std::vector<at::Tensor> blocks;
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < calls; ++i) {
      blocks.push_back(at::full({size}, -1));
      works.push_back(linked.all[r]->start(spread(r, size, at::full({1}, 1000 * r + i), blocks.back()), 7));
    }
  }
  expect_ended(works);
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < calls; ++i) {
      for (int from = 0; from < size; ++from) {
        ASSERT_EQ(blocks[r * calls + i][from].item<int64_t>(), 1000 * from + i);
      }
    }
  }
}

// ---- what never mixes

// Two ranks that start these; whether what one sends came to the other.
bool mixes(Links& first, uint64_t first_what, Links& second, uint64_t second_what) {
  const at::Tensor a = at::full({2}, -1), b = at::full({2}, -1);
  const Work one = first.start(spread(0, 2, at::full({1}, 5), a), first_what);
  const Work other = second.start(spread(1, 2, at::full({1}, 6), b), second_what);
  const bool ended = one->isCompleted();
  EXPECT_EQ(ended, other->isCompleted());
  if (!ended) {
    EXPECT_THAT(outcome(one, milliseconds(1)), HasSubstr("the wait gave up"));
    EXPECT_TRUE(a.eq(-1).all().item<bool>()) << "nothing is written before the end";
  }
  return ended;
}

TEST(LinksOf, RanksThatDoDifferentThingsNeverMix) {
  Linked linked(2, "local");
  EXPECT_TRUE(mixes(*linked.all[0], 7, *linked.all[1], 7));
  uint64_t number = 0;
  for (int bit = 0; bit < 64; ++bit) {
    Linked fresh(2, "local");
    number ^= uint64_t{0x9e3779b97f4a7c15} >> (bit % 7);
    EXPECT_FALSE(mixes(*fresh.all[0], number, *fresh.all[1], number ^ (uint64_t{1} << bit))) << "bit " << bit;
  }
  // The same at another time.
  Linked late(2, "local");
  const Work ahead = late.all[0]->start(spread(0, 2, at::full({1}, 5), at::full({2}, -1)), 7);
  EXPECT_FALSE(mixes(*late.all[0], 7, *late.all[1], 8));
  // Of another kind.
  Linked kinds(2, "local");
  Links gathers(kinds.ranks.all[1], kinds.issuing, std::make_shared<Wire>(), Cargo::gather);
  EXPECT_FALSE(mixes(*kinds.all[0], 7, gathers, 7));
}

TEST(LinksOf, BackendsThatHaveMessagesAreKnown) {
  const Ranks ranks(1);
  for (const auto& [name, has] :
       {std::pair("gloo", true), std::pair("local", true), std::pair("tcp", true), std::pair("shm+tcp", true),
        std::pair("shm", false), std::pair("nccl", false), std::pair("", false), std::pair("mpi", false)}) {
    EXPECT_EQ(Links::offered_by(*c10::make_intrusive<Disguised>(ranks.all[0], name)), has) << name;
  }
}

TEST_P(Scripts, OfARankThatFailedEndWithItsError) {
  Linked linked(3, GetParam());
  const Work work = linked.all[0]->start(spread(0, 3, at::ones({1}), at::ones({3})), 7);
  EXPECT_THAT(outcome(work, milliseconds(5)), HasSubstr("the wait gave up"));
  EXPECT_EQ(work->exception(), nullptr);
  linked.ranks.hub->fail(2, "plumb: rank 2: no file");
  EXPECT_THAT(outcome(work, milliseconds(20'000)), HasSubstr("rank 2 failed: rank 2: no file"));
  EXPECT_TRUE(work->isCompleted());
  EXPECT_NE(work->exception(), nullptr);
}

// Waits until it is given up, as a message of gloo's whose sender never comes.
struct Unanswered final : c10d::Work {
  bool isCompleted() override { return false; }
  bool wait(milliseconds) override {
    waited.set_value();
    given_up.get_future().wait();
    throw std::runtime_error("it was given up");
  }
  void abort() override { given_up.set_value(); }
  std::promise<void> waited, given_up;
};

class NeverAnswers final : public c10d::Backend {
 public:
  NeverAnswers() : c10d::Backend(0, 2) {}
  const std::string getBackendName() const override { return "gloo"; }
  Work send(std::vector<at::Tensor>&, int, int) override { return c10::make_intrusive<c10d::Work>(); }
  Work recv(std::vector<at::Tensor>&, int, int) override { return message; }
  c10::intrusive_ptr<Unanswered> message = c10::make_intrusive<Unanswered>();
};

// A thread waits where messages cannot be asked: it is woken from the one that never comes, and what waits behind it ends.
TEST(LinksOf, AGroupThatEndsWaitForNoMessageOfAnybody) {
  for (const int behind : {0, 3}) {
    const auto backend = c10::make_intrusive<NeverAnswers>();
    std::mutex issuing;
    auto links = std::make_unique<Links>(backend, issuing, std::make_shared<Wire>(), Cargo::control);
    const auto start = [&] {
      return links->start(
          [begun = false]() mutable -> Links::Round {
            if (std::exchange(begun, true)) return {};
            return {.sends = {}, .receives = {{1, at::zeros({1})}}};
          },
          7);
    };
    const Work first = start();
    backend->message->waited.get_future().wait();
    std::vector<c10::intrusive_ptr<Unanswered>> messages{backend->message};
    std::vector<Work> works{first};
    for (int i = 0; i < behind; ++i) {
      messages.push_back(backend->message = c10::make_intrusive<Unanswered>());
      works.push_back(start());
    }
    std::future<void> ended = std::async(std::launch::async, [&] { links.reset(); });
    const bool alone = ended.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    EXPECT_TRUE(alone);
    for (const auto& message : messages) {
      if (!alone) message->given_up.set_value();
    }
    ended.wait();
    for (const Work& work : works) EXPECT_NE(work->exception(), nullptr);
  }
}

}  // namespace
}  // namespace plumb

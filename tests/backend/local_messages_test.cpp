// Messages between two ranks of the local backend: each finds its place in whatever order both come, and what can never come
// is said to whoever waits for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>
#include <tuple>

#include "backend/support/local_ranks.h"
#include "plumb/error.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace test;

// Of one sender, receiver and tag they come in the order they were sent; a sender may write to its memory at once.
TEST(LocalMessages, FindTheirPlacesInWhateverOrderBothCome) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 draw(seed);
    const Ranks ranks(3);
    using Address = std::tuple<int, int, int>;  // from, to, tag
    std::map<Address, std::deque<double>> sent;
    std::map<Address, std::vector<std::pair<Work, at::Tensor>>> received;
    double next = 1;
    const auto send = [&](const Address& address) {
      const auto [from, to, tag] = address;
      const at::Tensor message = at::full({3}, next, at::kDouble);
      EXPECT_EQ(outcome(ranks.send(from, to, tag, message)), "");
      message.fill_(-1);
      sent[address].push_back(next++);
    };
    const auto receive = [&](const Address& address) {
      const auto [from, to, tag] = address;
      const at::Tensor memory = at::zeros({3}, at::kDouble);
      received[address].emplace_back(ranks.receive(to, from, tag, memory), memory);
    };
    for (int i = 0; i < 40; ++i) {
      const Address address{draw() % 3, draw() % 3, draw() % 2};
      draw() % 2 == 0 ? send(address) : receive(address);
    }
    for (auto& [address, messages] : sent) {
      while (received[address].size() < messages.size()) receive(address);
    }
    for (auto& [address, places] : received) {
      while (sent[address].size() < places.size()) send(address);
      for (size_t i = 0; i < places.size(); ++i) {
        EXPECT_EQ(outcome(places[i].first), "");
        ASSERT_TRUE(places[i].second.eq(sent[address][i]).all().item<bool>()) << seed;
      }
    }
  }
}

TEST(LocalMessages, OfAnotherLengthAreSaidToTheReceiverWhoeverCameFirst) {
  for (const bool send_first : {true, false}) {
    const Ranks ranks(3);
    const at::Tensor message = at::ones({3}), memory = at::zeros({4});
    if (send_first) ranks.send(2, 1, 7, message);
    const Work work = ranks.receive(1, 2, 7, memory);
    if (!send_first) ranks.send(2, 1, 7, message);
    EXPECT_THAT(outcome(work), HasSubstr("rank 1: a message of 12 bytes from rank 2 where 16 were expected"));
    EXPECT_TRUE(memory.eq(0).all().item<bool>());
  }
}

TEST(LocalMessages, ThatDoNotComeAreNamedByTheirSender) {
  const Ranks ranks(3);
  const Work work = ranks.receive(0, 2, 7, at::zeros({3}));
  EXPECT_THAT(outcome(work, milliseconds(5)), AllOf(HasSubstr("rank 0: waited 5 ms"), HasSubstr(" for rank 2")));
  EXPECT_ANY_THROW(ranks.receive(0, 3, 7, at::zeros({3})));
  EXPECT_ANY_THROW(ranks.send(0, -1, 7, at::zeros({3})));
}

// Before and after it leaves; what it sent before still comes.
TEST(LocalMessages, OfARankThatLeftEndTheWaitsForThem) {
  const std::string never = "a message of rank 2 can never come: rank 2 has ended its part";
  {
    const Ranks ranks(3);
    const at::Tensor memory = at::zeros({3});
    ranks.send(2, 0, 7, at::ones({3}));
    ranks.hub->leave(2);
    EXPECT_EQ(outcome(ranks.receive(0, 2, 7, memory)), "");
    EXPECT_TRUE(memory.eq(1).all().item<bool>());
    EXPECT_THAT(outcome(ranks.receive(0, 2, 7, memory)), HasSubstr("rank 0: " + never));
  }
  const Ranks ranks(3);
  const Work of_it = ranks.receive(1, 2, 7, at::zeros({3}));
  ranks.hub->leave(2);
  EXPECT_THAT(outcome(of_it), HasSubstr("rank 1: " + never));
  const Ranks others(3);
  const Work of_another = others.receive(1, 0, 7, at::zeros({3}));
  others.hub->leave(2);  // which owes nobody anything
  EXPECT_FALSE(of_another->isCompleted());
  others.send(0, 1, 7, at::ones({3}));
  EXPECT_EQ(outcome(of_another), "");
}

TEST(LocalMessages, AFailureEndsEveryWaitAsItsOwnRanks) {
  const Ranks ranks(3);
  const Work first = ranks.receive(0, 1, 7, at::zeros({3})), second = ranks.receive(1, 2, 7, at::zeros({3}));
  ranks.hub->fail(2, "plumb: rank 2: no file");
  EXPECT_THAT(outcome(first), HasSubstr("plumb: rank 0: rank 2 failed: rank 2: no file"));
  EXPECT_THAT(outcome(second), HasSubstr("plumb: rank 1: rank 2 failed: rank 2: no file"));
  EXPECT_THAT(outcome(ranks.receive(0, 1, 8, at::zeros({3}))), HasSubstr("rank 0: rank 2 failed"));
  EXPECT_THAT(outcome(ranks.send(1, 0, 8, at::zeros({3}))), HasSubstr("rank 1: rank 2 failed"));
}

}  // namespace
}  // namespace plumb

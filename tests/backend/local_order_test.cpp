// The local backend when ranks leave, fail or disagree at any point: what was complete counts, and the rest is named.
#include <atomic>
#include <random>
#include <thread>

#include "backend/support/local_ranks.h"
#include "plumb/error.h"
#include "plumb/world.h"
#include "world/group.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace test;

Work all_reduce(const Backend& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  return backend->allreduce(one);
}

// Ranks issue any number of collectives in any order, and one leaves: those it took part in end well when everybody has
// come, all others end with its name, for whoever had come and whoever comes.
TEST(LocalOrder, ARankThatLeavesEndsWhatItTookNoPartInAndNothingElse) {
  std::mt19937 random(20240);
  for (int turn = 0; turn < 300; ++turn) {
    const int size = 2 + static_cast<int>(random() % 4);
    const int leaver = static_cast<int>(random() % size);
    const int part = static_cast<int>(random() % 4);  // collectives it takes part in
    const int total = part + 1 + static_cast<int>(random() % 3);
    Ranks ranks(size);
    std::vector<std::vector<Work>> works(size);
    std::vector<std::vector<at::Tensor>> tensors(size);
    const auto issue_until = [&](int r, int count) {
      while (static_cast<int>(works[r].size()) < count) {
        tensors[r].push_back(at::full({5}, 10.0 * static_cast<double>(works[r].size()) + r));
        works[r].push_back(all_reduce(ranks.all[r], tensors[r].back()));
      }
    };
    for (const bool first : {true, false}) {  // the leaver's part before or after some of the others'
      for (int r = 0; r < size; ++r) {
        if (r != leaver && (first == (random() % 2 == 0) || !first)) issue_until(r, part);
      }
      issue_until(leaver, part);
    }
    for (int r = 0; r < size; ++r) {  // some wait already in what can never complete
      if (r != leaver && random() % 2 == 0) issue_until(r, part + 1);
    }
    ranks.hub->leave(leaver);
    for (int r = 0; r < size; ++r) {
      if (r != leaver) issue_until(r, total);
    }
    for (int r = 0; r < size; ++r) {
      for (int number = 0; number < static_cast<int>(works[r].size()); ++number) {
        const std::string text = outcome(works[r][number]);
        if (number < part) {
          ASSERT_EQ(text, "");
          ASSERT_EQ(tensors[r][number][4].item<double>(), size * 10.0 * number + size * (size - 1) / 2);
        } else {
          ASSERT_THAT(text, AllOf(HasSubstr("rank " + std::to_string(r) + ": all_reduce(sum) of 5 Float"),
                                  HasSubstr("rank " + std::to_string(leaver) + " has ended its part")));
        }
      }
    }
  }
}

// Not the one before it, to which somebody else may still come.
TEST(LocalOrder, ARankThatLeavesIsToldWithTheCollectiveThatMissesIt) {
  const Ranks ranks(3);
  const Work earlier = all_reduce(ranks.all[0], at::ones({5})), of_it = all_reduce(ranks.all[2], at::ones({5}));
  const Work missed = ranks.all[0]->barrier();
  ranks.hub->leave(2);
  for (const Work& work : {earlier, of_it, missed}) {
    EXPECT_THAT(outcome(work), HasSubstr("barrier can never complete: rank 2 has ended its part"));
  }
}

TEST(LocalOrder, ARankThatLeavesWhenNothingIsMissingHurtsNobody) {
  for (int size = 2; size < 5; ++size) {
    Ranks ranks(size);
    std::vector<Work> works;
    for (int r = 0; r < size; ++r) {
      works.push_back(ranks.all[r]->barrier());
      ranks.hub->leave(r);  // has taken part in all that anybody calls
    }
    for (const auto& work : works) EXPECT_EQ(outcome(work), "");
  }
}

TEST(LocalOrder, AFailureReachesEveryPendingAndLaterCollective) {
  Ranks ranks(3);
  const Work first = ranks.all[0]->barrier();
  const Work ahead = ranks.all[0]->barrier();
  const Work other = ranks.all[1]->barrier();
  ranks.hub->fail(2, "plumb: rank 2: no file");
  ranks.hub->fail(1, "a later one");  // the first counts
  const Work later = ranks.all[1]->barrier();
  for (const auto& [rank, work] : {std::pair{0, first}, {0, ahead}, {1, other}, {1, later}}) {
    EXPECT_TRUE(work->isCompleted());
    EXPECT_THAT(outcome(work), HasSubstr("rank " + std::to_string(rank) + ": rank 2 failed: rank 2: no file"));
  }
}

TEST(LocalOrder, AWaitThatRanOutNamesExactlyWhoDidNotCome) {
  for (int mask = 1; mask < 15; ++mask) {  // who has come, of four
    Ranks ranks(4, milliseconds(10));
    Work one;
    std::string late;
    for (int r = 0; r < 4; ++r) {
      if ((mask >> r) % 2 == 0) {
        late += (late.empty() ? "rank " : ", rank ") + std::to_string(r);
      } else {
        one = ranks.all[r]->barrier();
      }
    }
    EXPECT_THAT(outcome(one), AllOf(HasSubstr("waited 10 ms"), HasSubstr(" for " + late + ", which did not come")));
    EXPECT_THAT(outcome(one, milliseconds(5)), HasSubstr("waited 5 ms"));
  }
}

TEST(LocalOrder, RanksThatDisagreeInAnythingHearOfIt) {
  struct Row {
    std::function<Work(const Backend&)> one, another;
    std::string says, also;
  };
  const auto reduce = [](c10d::ReduceOp::RedOpType op, at::ScalarType dtype = at::kFloat, int64_t numel = 6) {
    return [=](const Backend& g) {
      std::vector<at::Tensor> tensors{at::ones({numel}, dtype)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      return g->allreduce(tensors, options);
    };
  };
  const auto broadcast = [](int root) {
    return [=](const Backend& g) {
      std::vector<at::Tensor> tensors{at::ones({6})};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return g->broadcast(tensors, options);
    };
  };
  const auto gather = [](const Backend& g) {
    at::Tensor whole = at::ones({12}), part = at::ones({6});
    return g->_allgather_base(whole, part);
  };
  const auto scatter = [](const Backend& g) {
    at::Tensor whole = at::ones({6}), part = at::ones({3});
    return g->_reduce_scatter_base(part, whole);
  };
  const auto barrier = [](const Backend& g) { return g->barrier(); };
  using c10d::ReduceOp;
  const std::vector<Row> rows{
      {reduce(ReduceOp::SUM), reduce(ReduceOp::MAX), "all_reduce(sum) of 6 Float", "all_reduce(max) of 6 Float"},
      {reduce(ReduceOp::AVG), reduce(ReduceOp::MIN), "all_reduce(avg) of 6 Float", "all_reduce(min) of 6 Float"},
      {reduce(ReduceOp::SUM), reduce(ReduceOp::SUM, at::kInt), "6 Float", "6 Int"},
      {reduce(ReduceOp::SUM), reduce(ReduceOp::SUM, at::kFloat, 7), "6 Float", "7 Float"},
      {broadcast(0), broadcast(1), "broadcast from rank 0 of 6 Float", "broadcast from rank 1 of 6 Float"},
      {gather, scatter, "all_gather of 6 Float", "reduce_scatter(sum) of 6 Float"},
      {gather, reduce(ReduceOp::SUM), "all_gather of 6 Float", "all_reduce(sum) of 6 Float"},
      {gather, barrier, "all_gather of 6 Float", "called barrier"},
      {broadcast(0), barrier, "broadcast from rank 0", "called barrier"},
  };
  for (const Row& row : rows) {
    for (const bool swapped : {false, true}) {  // whoever comes first
      Ranks ranks(2);
      std::vector<Work> works(2);
      for (const int r : swapped ? std::vector{1, 0} : std::vector{0, 1}) {
        works[r] = (r == 0 ? row.one : row.another)(ranks.all[r]);
      }
      for (int r = 0; r < 2; ++r) {
        EXPECT_THAT(outcome(works[r]),
                    AllOf(HasSubstr("rank " + std::to_string(r) + ": rank 0 called "), HasSubstr(row.says),
                          HasSubstr("where rank 1 called "), HasSubstr(row.also), HasSubstr("in the same order")));
      }
    }
  }
}

TEST(LocalOrder, SplitsThatDoNotFitAreRefusedOrNamed) {
  const auto exchange = [](const Backend& g, int64_t in, int64_t out, std::vector<int64_t> sent,
                           std::vector<int64_t> expected) {
    at::Tensor input = at::ones({in, 2}), output = at::ones({out, 2});
    return g->alltoall_base(output, input, expected, sent);
  };
  Ranks ranks(2);
  const Backend& zero = ranks.all[0];
  // Of 3 rows, or for 2 ranks.
  for (const auto& bad : {std::vector<int64_t>{1, 1}, std::vector<int64_t>{2, 2}, std::vector<int64_t>{4, -1},
                          std::vector<int64_t>{3}, std::vector<int64_t>{1, 1, 1}}) {
    EXPECT_THROW(exchange(zero, 3, 3, bad, {1, 2}), Error);
    EXPECT_THROW(exchange(zero, 3, 3, {1, 2}, bad), Error);
  }
  EXPECT_THROW(exchange(zero, 3, 4, {}, {}), Error);
  EXPECT_THROW(exchange(zero, 4, 3, {}, {}), Error);
  // Nothing is written past the end of what is narrower.
  at::Tensor wide = at::ones({4}, at::kDouble), narrow = at::ones({4});
  std::vector<int64_t> equal;
  EXPECT_THROW(zero->alltoall_base(narrow, wide, equal, equal), Error);
  const Work a = exchange(ranks.all[0], 3, 3, {1, 2}, {1, 2});
  const Work b = exchange(ranks.all[1], 3, 3, {1, 2}, {2, 1});
  EXPECT_THAT(outcome(a), HasSubstr("rank 1 sends 2 elements to rank 0, which expects 4"));
  EXPECT_EQ(outcome(a), outcome(b));
}

TEST(LocalOrder, ShardsOfOtherSizesOrDtypesAreRefused) {
  Ranks ranks(2);
  const Backend& zero = ranks.all[0];
  const auto scatter = [&](const at::Tensor& part, std::vector<at::Tensor> parts) {
    std::vector<at::Tensor> out{part};
    std::vector<std::vector<at::Tensor>> in{std::move(parts)};
    return zero->reduce_scatter(out, in);
  };
  const at::Tensor three = at::ones({3});
  EXPECT_THROW(scatter(three, {three}), Error);
  EXPECT_THROW(scatter(three, {three, three, three}), Error);
  EXPECT_THROW(scatter(three, {three, at::ones({2})}), Error);
  EXPECT_THROW(scatter(three, {at::ones({2}), three}), Error);
  EXPECT_THROW(scatter(three, {three, at::ones({3}, at::kDouble)}), Error);
  EXPECT_THROW(scatter(three, {three, at::ones({3, 2}).select(1, 0)}), Error);
  for (const int root : {-1, 2}) {
    std::vector<at::Tensor> one{three};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    EXPECT_THROW(zero->broadcast(one, options), Error);
  }
  std::vector<at::Tensor> two{three, three};
  EXPECT_THROW(zero->allreduce(two), Error);
}

}  // namespace
}  // namespace plumb

// What every backend refuses before anybody waits, word for word; and what collectives are called.
#include "backend/arguments.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "backend/verb.h"
#include "plumb/error.h"

namespace plumb::arguments {
namespace {

using ::testing::ElementsAre;

const Checker check{"the test's backend", 2, 3};  // rank 2 of 3

std::string refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
std::string said(const std::string& text) { return "plumb: rank 2: " + text; }

TEST(Arguments, OneTensorPerCall) {
  const at::Tensor tensor = at::ones({2});
  EXPECT_TRUE(check.one({tensor}).is_same(tensor));
  EXPECT_EQ(refused([] { check.one({}); }), said("the test's backend takes one tensor per call, not 0"));
  EXPECT_EQ(refused([&] { check.one({tensor, tensor}); }), said("the test's backend takes one tensor per call, not 2"));
}

TEST(Arguments, ShardsDivideTheWhole) {
  for (const int64_t each : {0, 1, 5}) {
    EXPECT_EQ(refused([&] { check.divide(at::ones({3 * each}), at::ones({each})); }), "");
    EXPECT_EQ(refused([&] { check.divide(at::ones({3 * each + 1}), at::ones({each})); }),
              said("a full tensor of " + std::to_string(3 * each + 1) + " Float does not hold 3 shards of " +
                   std::to_string(each) + " Float"));
  }
  EXPECT_EQ(refused([] { check.divide(at::ones({6}, at::kLong), at::ones({2})); }),
            said("a full tensor of 6 Long does not hold 3 shards of 2 Float"));
  EXPECT_EQ(refused([] { check.divide(at::ones({2}), at::ones({6})); }),
            said("a full tensor of 2 Float does not hold 3 shards of 6 Float"));
}

TEST(Arguments, LieInOnePieceOnTheHost) {
  EXPECT_EQ(refused([] { check.contiguous_on_cpu(at::ones({2, 3})); }), "");
  EXPECT_EQ(refused([] { check.contiguous_on_cpu(at::ones({2, 3}).t()); }),
            said("the test's backend takes contiguous CPU tensors; this one is on cpu and not contiguous"));
  EXPECT_EQ(refused([] { check.contiguous_on_cpu(at::empty({2}, at::kMeta)); }),
            said("the test's backend takes contiguous CPU tensors; this one is on meta"));
}

TEST(Arguments, SplitsAreRowsAndBecomeElements) {
  EXPECT_THAT(check.in_elements(at::ones({6, 4}), {}), ElementsAre(8, 8, 8));
  EXPECT_THAT(check.in_elements(at::ones({0, 4}), {}), ElementsAre(0, 0, 0));
  EXPECT_THAT(check.in_elements(at::ones({6, 4}), {1, 0, 5}), ElementsAre(4, 0, 20));
  EXPECT_THAT(check.in_elements(at::ones({0, 4}), {0, 0, 0}), ElementsAre(0, 0, 0));
  EXPECT_THAT(check.in_elements(at::ones({6}), {1, 2, 3}), ElementsAre(1, 2, 3));
  EXPECT_EQ(refused([] { check.in_elements(at::ones({}), {}); }),
            said("all_to_all takes tensors with at least one dimension"));
  EXPECT_EQ(refused([] { check.in_elements(at::ones({7}), {}); }), said("all_to_all: 7 rows do not divide by 3"));
  const std::vector<std::vector<int64_t>> wrong = {{1, 2, 4},  {1, 2, 2},  {3, 3},    {1, 2, 3, 0},
                                                   {-1, 4, 3}, {7, -1, 0}, {6, 1, -1}};
  for (const auto& splits : wrong) {
    EXPECT_EQ(refused([&] { check.in_elements(at::ones({6, 2}), splits); }),
              said("all_to_all: the splits do not add up to the 6 rows"))
        << splits;
  }
}

TEST(Arguments, WhatIsExchangedIsOfOneDtype) {
  EXPECT_EQ(refused([] { check.one_dtype(at::ones({3}, at::kLong), at::ones({6}, at::kLong)); }), "");
  EXPECT_EQ(refused([] { check.one_dtype(at::ones({3}, at::kDouble), at::ones({3})); }),
            said("all_to_all from Double to Float; both must have one dtype"));
}

TEST(Arguments, ReductionsAreThoseThatHaveAMeaning) {
  using Op = c10d::ReduceOp;
  EXPECT_EQ(check.reduction(Op(Op::SUM), at::kFloat), Reduction::sum);
  EXPECT_EQ(check.reduction(Op(Op::AVG), at::kBFloat16), Reduction::average);
  EXPECT_EQ(check.reduction(Op(Op::MAX), at::kLong), Reduction::maximum);
  EXPECT_EQ(check.reduction(Op(Op::MIN), at::kInt), Reduction::minimum);
  for (const auto op : {Op::PRODUCT, Op::BAND, Op::BOR, Op::BXOR}) {
    EXPECT_EQ(reduction_of(op), std::nullopt);
    EXPECT_EQ(refused([&] { check.reduction(Op(op), at::kFloat); }),
              said("the test's backend reduces by sum, avg, max and min only"));
  }
  EXPECT_NE(refused([] { check.reduction(Op(Op::AVG), at::kLong); }), "");
  EXPECT_NE(refused([] { check.reduction(Op(Op::SUM), at::kBool); }), "");
}

TEST(Verbs, HaveNamesAndTypes) {
  using c10d::OpType;
  const std::tuple<Verb, std::string, OpType> table[] = {
      {Verb::barrier, "barrier", OpType::BARRIER},
      {Verb::broadcast, "broadcast", OpType::BROADCAST},
      {Verb::all_gather, "all_gather", OpType::_ALLGATHER_BASE},
      {Verb::reduce_scatter, "reduce_scatter", OpType::_REDUCE_SCATTER_BASE},
      {Verb::all_reduce, "all_reduce", OpType::ALLREDUCE},
      {Verb::all_to_all, "all_to_all", OpType::ALLTOALL_BASE},
      {Verb::scatter, "scatter", OpType::SCATTER}};
  std::set<Verb> all;
  for (const auto& [verb, name, type] : table) {
    EXPECT_EQ(name_of(verb), name);
    EXPECT_EQ(type_of(verb), type);
    all.insert(verb);
  }
  EXPECT_EQ(all.size(), std::size(table));
}

}  // namespace
}  // namespace plumb::arguments

// Addition: sums that are right, the same for any number of ranks, and never the held-out ones.
#include "model/addition.h"

#include <gtest/gtest.h>
#include "libtorch.h"

namespace plumb::model {

namespace {

TEST(Addition, WritesTheSumLowestDigitFirst) {
  const Addition task(3, 1);
  const Batch batch = task.batch(4, 10, 5);
  for (int64_t row = 0; row < 5; ++row) {
    const auto number = [&](const at::Tensor& t, int64_t first, int64_t count) {
      int64_t value = 0;
      for (int64_t i = 0; i < count; ++i) value = 10 * value + t[row][first + i].item<int64_t>();
      return value;
    };
    const auto [a, b] = task.training_pair(4, 10 + row);
    EXPECT_EQ(number(batch.input, 0, 3), a);
    EXPECT_EQ(number(batch.input, 4, 3), b);
    int64_t sum = 0;
    for (int64_t i = 3; i >= 0; --i) sum = 10 * sum + batch.target[row][i].item<int64_t>();
    EXPECT_EQ(sum, a + b);
  }
  EXPECT_EQ(batch.input.size(1), task.length());
  EXPECT_TRUE(at::equal(batch.input.narrow(1, 8, 3), batch.target.narrow(1, 0, 3)));
}

TEST(Addition, MakesTheSameBatchInPartsAsInOne) {
  const Addition task(3, 1);
  const Batch whole = task.batch(7, 0, 8), left = task.batch(7, 0, 4), right = task.batch(7, 4, 4);
  EXPECT_TRUE(at::equal(whole.input, at::cat({left.input, right.input})));
  EXPECT_TRUE(at::equal(whole.target, at::cat({left.target, right.target})));
  EXPECT_FALSE(at::equal(whole.input, task.batch(8, 0, 8).input));
}

TEST(Addition, NeverTrainsOnAHeldOutPairEitherWayRound) {
  for (const int64_t digits : {1, 2, 3, 9}) {
    const Addition task(digits, 3);
    for (int64_t i = 0; i < 2000; ++i) {
      const auto [a, b] = task.training_pair(0, i);
      EXPECT_FALSE(Addition::is_held_out(a, b));
      EXPECT_FALSE(Addition::is_held_out(b, a));
      const auto [c, d] = task.held_out_pair(i);
      EXPECT_TRUE(Addition::is_held_out(c, d));
    }
  }
}

}  // namespace

}  // namespace plumb::model

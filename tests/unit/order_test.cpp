// What is gathered ahead: whatever followed the last time.
#include "unit/order.h"

#include <gtest/gtest.h>

namespace plumb {
namespace {

TEST(Order, KnowsNothingUpToTheFirstBackward) {
  Order order;
  for (int home : {0, 1, 2, 1, 0}) EXPECT_EQ(order.after(home), -1);
}

TEST(Order, FollowsTheLastOneInBothDirections) {
  Order order;
  for (int home : {0, 1, 2, 1, 0}) order.after(home);
  order.restart();
  EXPECT_EQ(order.after(0), 1);
  EXPECT_EQ(order.after(1), 2);
  EXPECT_EQ(order.after(2), 1);
  EXPECT_EQ(order.after(1), 0);
  EXPECT_EQ(order.after(0), -1);
}

TEST(Order, FindsItsPlaceAgainAfterSomethingElse) {
  Order order;
  for (int home : {0, 1, 2, 3}) order.after(home);
  order.restart();
  EXPECT_EQ(order.after(2), 3);
  EXPECT_EQ(order.after(7), -1);
  EXPECT_EQ(order.after(0), 1);
  order.restart();
  EXPECT_EQ(order.after(2), 7);
}

TEST(Order, ABackwardThatGathersNothingTeachesNothing) {
  Order order;
  for (int home : {4, 5}) order.after(home);
  order.restart();
  order.restart();
  EXPECT_EQ(order.after(4), 5);
}

}  // namespace
}  // namespace plumb

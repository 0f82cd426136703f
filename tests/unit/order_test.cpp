// What is gathered ahead: whatever followed the last time.
#include "unit/order.h"

#include <gtest/gtest.h>

namespace plumb {
namespace {

// `home` is used; what is to follow, or -1.
int after(Order& order, int home) {
  order.use(home);
  return order.following().empty() ? -1 : order.following().front();
}

TEST(Order, KnowsNothingUpToTheFirstBackward) {
  Order order;
  for (int home : {0, 1, 2, 1, 0}) EXPECT_EQ(after(order, home), -1);
}

TEST(Order, FollowsTheLastOneInBothDirections) {
  Order order;
  for (int home : {0, 1, 2, 1, 0}) order.use(home);
  order.restart();
  EXPECT_EQ(after(order, 0), 1);
  EXPECT_EQ(after(order, 1), 2);
  EXPECT_EQ(after(order, 2), 1);
  EXPECT_EQ(after(order, 1), 0);
  EXPECT_EQ(after(order, 0), -1);
}

TEST(Order, FindsItsPlaceAgainAfterSomethingElse) {
  Order order;
  for (int home : {0, 1, 2, 3}) order.use(home);
  order.restart();
  EXPECT_EQ(after(order, 2), 3);
  EXPECT_EQ(after(order, 7), -1);
  EXPECT_EQ(after(order, 0), 1);
  order.restart();
  EXPECT_EQ(after(order, 2), 7);
}

TEST(Order, ABackwardThatGathersNothingTeachesNothing) {
  Order order;
  for (int home : {4, 5}) order.use(home);
  order.restart();
  order.restart();
  EXPECT_EQ(after(order, 4), 5);
}

}  // namespace
}  // namespace plumb

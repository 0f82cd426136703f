// The origin of a NaN or an inf: the operation that made the first one, in the forward or in the backward.
#include "cli/origin.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

namespace plumb::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST(Origin, OfNothingIsNothing) {
  const OriginWatch watch;
  const at::Tensor x = at::ones({3}).requires_grad_();
  (x * 2).sum().backward();
  EXPECT_EQ(watch.found(), "");
}

TEST(Origin, OfAnInfIsTheOperationThatOverflowed) {
  const at::Tensor x = at::full({2, 3}, 3e38);
  const OriginWatch watch;
  const at::Tensor large = (x + x).mul(2);  // the second one got it, and made none
  EXPECT_TRUE(large.isinf().all().item<bool>());
  EXPECT_THAT(watch.found(),
              MatchesRegex("aten::add made inf .operation 1, in the forward, of \\[2, 3\\] and \\[2, 3\\]."));
}

TEST(Origin, OfAnInfThatBecomesANanNamesBoth) {
  const at::Tensor x = at::full({2}, 3e38);
  const OriginWatch watch;
  const at::Tensor large = x + x, nan = large - large;
  EXPECT_TRUE(nan.isnan().all().item<bool>());
  EXPECT_THAT(watch.found(), HasSubstr("aten::add made inf (operation 1, in the forward"));
  EXPECT_THAT(watch.found(), HasSubstr(", then aten::sub made NaN out of an inf (operation 2, in the forward"));
}

// All is finite until the root's derivative at 0 is asked for.
TEST(Origin, OfANanThatBeginsInTheBackwardIsNamedWithItsNode) {
  const at::Tensor x = at::zeros({3}).requires_grad_();
  const OriginWatch watch;
  const at::Tensor loss = (x.sqrt() * 0).sum();
  EXPECT_EQ(loss.item<float>(), 0);
  EXPECT_EQ(watch.found(), "");
  loss.backward();
  EXPECT_TRUE(x.grad().isnan().all().item<bool>());
  EXPECT_THAT(watch.found(), HasSubstr("made NaN"));
  EXPECT_THAT(watch.found(), HasSubstr("in the backward of SqrtBackward0"));
}

}  // namespace
}  // namespace plumb::cli

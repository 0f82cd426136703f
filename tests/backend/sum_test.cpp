// The reduction kernel beside a plain one: every dtype and number of ranks, around every edge of its chunks.
#include "backend/sum.h"

#include <cmath>
#include <limits>
#include <random>

#include "plumb/error.h"
#include "world/support/plain.h"

namespace plumb::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<at::ScalarType> numbers{at::kFloat, at::kDouble,       at::kHalf,         at::kBFloat16,
                                          at::kLong,  at::kInt,          at::kShort,        at::kChar,
                                          at::kByte,  at::kComplexFloat, at::kComplexDouble};
const std::vector<Reduction> reductions{Reduction::sum, Reduction::average, Reduction::maximum, Reduction::minimum};
// Chunks are of 2048 elements.
const std::vector<int64_t> lengths{0, 1, 2, 3, 255, 2047, 2048, 2049, 4095, 4096, 4097, 5001};

bool defined(at::ScalarType dtype, Reduction reduction) {
  const bool ordered = reduction == Reduction::maximum || reduction == Reduction::minimum;
  if (ordered && c10::isComplexType(dtype)) return false;
  return reduction != Reduction::average || !c10::isIntegralType(dtype, true);
}

std::vector<at::Tensor> inputs_of(int ranks, int64_t numel, at::ScalarType dtype, uint32_t seed) {
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < ranks; ++r) inputs.push_back(varied(numel, dtype, seed + r));
  return inputs;
}

void reduce_into(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, int64_t numel,
                 Reduction reduction) {
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const auto& input : inputs) in.push_back(input.const_data_ptr());
  for (const auto& output : outputs) out.push_back(output.data_ptr());
  reduce_in_order(in, out, numel, inputs[0].scalar_type(), reduction);
}

TEST(Sum, EqualsThePlainOneInEveryBitForAnyDtypeLengthAndNumberOfRanks) {
  const uint32_t seed = std::random_device()();
  for (const auto dtype : numbers) {
    for (const Reduction reduction : reductions) {
      if (!defined(dtype, reduction)) continue;
      for (int ranks = 1; ranks <= 5; ++ranks) {
        for (const int64_t numel : lengths) {
          const auto inputs = inputs_of(ranks, numel, dtype, seed);
          const at::Tensor right = plain_reduction(inputs, reduction);
          at::Tensor out = at::empty({numel}, dtype);
          reduce_into(inputs, {out}, numel, reduction);
          ASSERT_TRUE(same_bits(out, right)) << "seed " << seed << ", " << ranks << " ranks, " << numel << " " << dtype
                                             << ", reduction " << static_cast<int>(reduction);
          // And the plain one is not wrong itself: as near to the true value as its dtype allows.
          const double unit = c10::isIntegralType(dtype, true)             ? 0
                              : dtype == at::kHalf                         ? std::ldexp(1, -11)
                              : dtype == at::kBFloat16                     ? std::ldexp(1, -8)
                              : c10::toRealValueType(dtype) == at::kDouble ? std::ldexp(1, -50)
                                                                           : std::ldexp(1, -21);
          ASSERT_LE(relative_error(out, inputs, reduction), unit) << ranks << " ranks, " << numel << " " << dtype;
        }
      }
    }
  }
}

TEST(Sum, MayGoToSeveralOutputsInPlaceAndTouchesNothingBeside) {
  const uint32_t seed = std::random_device()();
  constexpr int64_t edge = 16;
  for (const auto dtype : numbers) {
    for (const int64_t numel : lengths) {
      for (int ranks = 1; ranks <= 4; ++ranks) {
        const auto inputs = inputs_of(ranks, numel, dtype, seed);
        const at::Tensor right = plain_reduction(inputs, Reduction::sum);
        // Each input lies between two edges, and is an output, too.
        std::vector<at::Tensor> framed, places;
        for (const auto& input : inputs) {
          framed.push_back(varied(numel + 2 * edge, dtype, seed + 99));
          places.push_back(framed.back().narrow(0, edge, numel));
          places.back().copy_(input);
        }
        const at::Tensor frame = varied(numel + 2 * edge, dtype, seed + 99);
        reduce_into(places, places, numel, Reduction::sum);
        for (int r = 0; r < ranks; ++r) {
          ASSERT_TRUE(same_bits(places[r], right)) << "seed " << seed << ", " << numel << " " << dtype;
          ASSERT_TRUE(same_bits(framed[r].narrow(0, 0, edge), frame.narrow(0, 0, edge)));
          ASSERT_TRUE(same_bits(framed[r].narrow(0, edge + numel, edge), frame.narrow(0, edge + numel, edge)));
        }
      }
    }
  }
}

TEST(Sum, KeepsANaNOfAnyRankInEveryReductionAndInfinitiesInTheirOrder) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const Reduction reduction : reductions) {
      for (int where = 0; where < 3; ++where) {
        std::vector<at::Tensor> inputs{at::tensor({1.f, inf, -1.f}), at::tensor({2.f, -1.f, -inf}),
                                       at::tensor({-3.f, 4.f, 5.f})};
        inputs[where][0] = nan;
        for (auto& input : inputs) input = input.to(dtype);
        at::Tensor out = at::empty({3}, dtype);
        reduce_into(inputs, {out}, 3, reduction);
        EXPECT_TRUE(std::isnan(out[0].item<float>())) << dtype << static_cast<int>(reduction) << where;
        EXPECT_EQ(out[1].item<float>(), reduction == Reduction::minimum ? -1 : inf);
        EXPECT_EQ(out[2].item<float>(), reduction == Reduction::maximum ? 5 : -inf);
      }
    }
  }
}

TEST(Sum, RefusesWhatHasNoMeaning) {
  for (const auto dtype : numbers) {
    for (const Reduction reduction : reductions) {
      if (defined(dtype, reduction)) continue;
      const at::Tensor one = varied(3, dtype, 1);
      try {
        reduce_into({one}, {one}, 0, reduction);
        ADD_FAILURE() << "not refused: " << dtype;
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr(c10::toString(dtype)));
        EXPECT_THAT(e.what(), HasSubstr(c10::isComplexType(dtype) ? "no order" : "reduce the sum instead"));
      }
    }
  }
}

}  // namespace
}  // namespace plumb::testing

// A sum of doubles that does not depend on their order: fixed point, wide enough for every double.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

namespace plumb {

class ExactSum {
 public:
  // 32 bits of the sum in each limb, the lowest of value 2^-1074; then how many values were infinite, and how many no numbers.
  // Limbs of several sums may be added up.
  static constexpr int kLimbs = 68;
  std::array<int64_t, kLimbs + 2> limbs{};

  void add(double value) {  // not negative
    if (!std::isfinite(value)) {
      ++limbs[std::isnan(value) ? kLimbs + 1 : kLimbs];
      return;
    }
    if (value == 0) return;
    int exponent = 0;
    const double fraction = std::frexp(value, &exponent);  // in [0.5, 1)
    auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, 53));
    int position = exponent - 53 + 1074;
    if (position < 0) {
      mantissa >>= -position;  // exact: a subnormal has zeros there
      position = 0;
    }
    const int limb = position / 32;
    const int shift = position % 32;
    const auto wide = static_cast<unsigned __int128>(mantissa) << shift;
    limbs[limb] += static_cast<int64_t>(static_cast<uint32_t>(wide));
    limbs[limb + 1] += static_cast<int64_t>(static_cast<uint32_t>(wide >> 32));
    limbs[limb + 2] += static_cast<int64_t>(static_cast<uint32_t>(wide >> 64));
    if (++pending_ == (1 << 30)) carry();
  }

  // Every limb below 2^32, so that limbs of several sums can be added.
  void carry() {
    pending_ = 0;
    for (int i = 0; i + 1 < kLimbs; ++i) {
      limbs[i + 1] += limbs[i] >> 32;
      limbs[i] &= 0xffffffff;
    }
  }

  double value() {
    if (limbs[kLimbs + 1] != 0) return std::numeric_limits<double>::quiet_NaN();
    if (limbs[kLimbs] != 0) return std::numeric_limits<double>::infinity();
    carry();
    double sum = 0;
    for (int i = kLimbs - 1; i >= 0; --i) sum += std::ldexp(static_cast<double>(limbs[i]), 32 * i - 1074);
    return sum;
  }

 private:
  int32_t pending_ = 0;
};

}  // namespace plumb

// The reduction kernel of the `local` backend and of the gloo reduce-scatter: one pass over the memory, in chunks.
#include "backend/sum.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "plumb/error.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // these loops are all the work there is: at -O2, GCC leaves them scalar
#endif

namespace plumb {
namespace {

constexpr int64_t chunk = 2048;  // elements; the accumulator stays in the first-level cache

template <class T>
void reduce(std::span<const void* const> inputs, std::span<void* const> outputs, int64_t numel, Reduction reduction) {
  // Integers keep their own type: f32 would round them.
  using Wide = std::conditional_t<std::is_integral_v<T>, T, at::opmath_type<T>>;
  std::array<Wide, chunk> total;
  for (int64_t begin = 0; begin < numel; begin += chunk) {
    const int64_t count = std::min(chunk, numel - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (int64_t i = 0; i < count; ++i) total[i] = static_cast<Wide>(first[i]);
    for (size_t r = 1; r < inputs.size(); ++r) {
      const T* next = static_cast<const T*>(inputs[r]) + begin;
      if (reduction == Reduction::sum || reduction == Reduction::average) {
        for (int64_t i = 0; i < count; ++i) total[i] += static_cast<Wide>(next[i]);
      } else if constexpr (!c10::is_complex<T>::value) {
        for (int64_t i = 0; i < count; ++i) {
          const Wide value = static_cast<Wide>(next[i]);
          // Written so that a NaN, which alone differs from itself, stays on either side.
          const bool better = reduction == Reduction::maximum ? value > total[i] : value < total[i];
          if (better || value != value) total[i] = value;  // NOLINT(misc-redundant-expression)
        }
      }
    }
    if (reduction == Reduction::average) {
      if constexpr (!std::is_integral_v<T>) {
        using Real = typename c10::scalar_value_type<Wide>::type;  // a complex number is divided part by part
        for (int64_t i = 0; i < count; ++i) total[i] = total[i] / static_cast<Real>(inputs.size());
      }
    }
    for (void* output : outputs) {
      T* out = static_cast<T*>(output) + begin;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(total[i]);
    }
  }
}

}  // namespace

void reduce_in_order(std::span<const void* const> inputs, std::span<void* const> outputs, int64_t numel,
                     at::ScalarType dtype, Reduction reduction) {
  const bool ordered = reduction == Reduction::maximum || reduction == Reduction::minimum;
  if (ordered && at::isComplexType(dtype)) {
    throw Error(std::string(c10::toString(dtype)) + " has no order; only sums and averages of it can be reduced");
  }
  if (reduction == Reduction::average && at::isIntegralType(dtype, /*includeBool=*/true)) {
    throw Error(std::string("an average of ") + c10::toString(dtype) + " would be cut off; reduce the sum instead");
  }
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(at::kHalf, at::kBFloat16, dtype, "plumb::reduce_in_order",
                                         [&] { reduce<scalar_t>(inputs, outputs, numel, reduction); });
}

}  // namespace plumb

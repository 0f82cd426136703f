// One loop per element; slow, and short enough to be believed.
#include "world/support/plain.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

namespace plumb::testing {
namespace {

at::Tensor flat_real(const at::Tensor& tensor) {
  return (tensor.is_complex() ? at::view_as_real(tensor) : tensor).reshape({-1});
}

// `Sum`: what is added up in.
template <class T, class Sum>
at::Tensor one_by_one(const std::vector<at::Tensor>& inputs, Reduction reduction) {
  at::Tensor result = at::empty({inputs[0].numel()}, inputs[0].options());
  T* out = result.data_ptr<T>();
  std::vector<const T*> in;
  for (const auto& input : inputs) in.push_back(input.const_data_ptr<T>());
  for (int64_t i = 0; i < result.numel(); ++i) {
    const auto of = [&](size_t r) { return static_cast<Sum>(in[r][i]); };
    Sum value = of(0);
    for (size_t r = 1; r < inputs.size(); ++r) {
      const bool nan = value != value || of(r) != of(r);
      if (reduction == Reduction::sum || reduction == Reduction::average) value = static_cast<Sum>(value + of(r));
      if (reduction == Reduction::maximum) value = nan ? (value != value ? value : of(r)) : std::max(value, of(r));
      if (reduction == Reduction::minimum) value = nan ? (value != value ? value : of(r)) : std::min(value, of(r));
    }
    if (reduction == Reduction::average) value = static_cast<Sum>(value / static_cast<Sum>(inputs.size()));
    out[i] = static_cast<T>(value);
  }
  return result;
}

}  // namespace

at::Tensor plain_reduction(const std::vector<at::Tensor>& inputs, Reduction reduction) {
  if (inputs[0].is_complex()) {  // sums of complex numbers are sums of their parts
    std::vector<at::Tensor> parts;
    for (const auto& input : inputs) parts.push_back(at::view_as_real(input.contiguous()).reshape({-1}));
    return at::view_as_complex(plain_reduction(parts, reduction).view({inputs[0].numel(), 2}));
  }
  switch (inputs[0].scalar_type()) {
    case at::kHalf:
      return one_by_one<at::Half, float>(inputs, reduction);
    case at::kBFloat16:
      return one_by_one<at::BFloat16, float>(inputs, reduction);
    case at::kFloat:
      return one_by_one<float, float>(inputs, reduction);
    case at::kDouble:
      return one_by_one<double, double>(inputs, reduction);
    case at::kLong:
      return one_by_one<int64_t, int64_t>(inputs, reduction);
    case at::kInt:
      return one_by_one<int32_t, int64_t>(inputs, reduction);
    case at::kShort:
      return one_by_one<int16_t, int64_t>(inputs, reduction);
    case at::kChar:
      return one_by_one<int8_t, int64_t>(inputs, reduction);
    case at::kByte:
      return one_by_one<uint8_t, int64_t>(inputs, reduction);
    default:
      throw std::runtime_error("no plain reduction of this dtype");
  }
}

double relative_error(const at::Tensor& result, const std::vector<at::Tensor>& inputs, Reduction reduction) {
  at::Tensor truth = flat_real(inputs[0]).to(at::kDouble).clone();
  at::Tensor scale = truth.abs();
  for (size_t r = 1; r < inputs.size(); ++r) {
    const at::Tensor next = flat_real(inputs[r]).to(at::kDouble);
    scale = scale + next.abs();
    if (reduction == Reduction::maximum) truth = at::maximum(truth, next);
    if (reduction == Reduction::minimum) truth = at::minimum(truth, next);
    if (reduction == Reduction::sum || reduction == Reduction::average) truth = truth + next;
  }
  if (reduction == Reduction::average) truth = truth / static_cast<double>(inputs.size());
  if (truth.numel() == 0) return 0;
  return ((flat_real(result).to(at::kDouble) - truth).abs() / (scale + 1e-300)).max().item<double>();
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.numel() == y.numel() &&
         (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

at::Tensor varied(int64_t numel, at::ScalarType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  if (c10::isComplexType(dtype)) {
    return at::view_as_complex(varied(2 * numel, c10::toRealValueType(dtype), seed).view({numel, 2}));
  }
  at::Tensor values = at::empty({numel}, at::kDouble);
  for (int64_t i = 0; i < numel; ++i) {
    const double unit = static_cast<double>(random()) / 4294967296.0 - 0.5;
    const bool whole = c10::isIntegralType(dtype, true);
    values.data_ptr<double>()[i] = whole ? std::floor(unit * 40) : std::ldexp(unit, static_cast<int>(random() % 12));
  }
  if (dtype == at::kByte) values = values.abs();
  if (dtype == at::kBool) values = values.gt(0).to(at::kDouble);
  return values.to(dtype);
}

}  // namespace plumb::testing

// What tests draw modules from, and the same functions of single rows in f64.
#pragma once
#include <gtest/gtest.h>
#include "libtorch.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "nn/support/fused.h"

namespace plumb::test {

class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) { torch::manual_seed(seed); }
  int64_t in(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool coin() { return in(0, 1) == 1; }
  template <class T>
  T of(const std::vector<T>& all) {
    return all[static_cast<size_t>(in(0, static_cast<int64_t>(all.size()) - 1))];
  }
  // Tokens per expert: any, many of them none, or all on one expert.
  Counts counts(int64_t experts) {
    Counts all(static_cast<size_t>(experts), 0);
    const int64_t how = in(0, 2);
    if (how == 0) {
      all[static_cast<size_t>(in(0, experts - 1))] = in(0, 9);
      return all;
    }
    for (int64_t& one : all) one = how == 1 && coin() ? 0 : in(0, 7);
    return all;
  }

 private:
  std::mt19937_64 engine_;
};

// ---- the plain functions, in f64

inline at::Tensor silu64(const at::Tensor& x) { return x / (1 + (-x).exp()); }
inline at::Tensor gelu64(const at::Tensor& x) { return 0.5 * x * (1 + at::erf(x / std::sqrt(2.0))); }

inline at::Tensor activated(const at::Tensor& h, nn::Activation activation) {
  if (activation == nn::Activation::gelu) return gelu64(h);
  const int64_t half = h.size(-1) / 2;
  return silu64(h.narrow(-1, 0, half)) * h.narrow(-1, half, half);
}

// Expert e's part of a parameter that is one for all, or one each.
inline at::Tensor of_expert(const std::vector<at::Tensor>& all, int64_t whole_dim, int64_t e) {
  return all.size() == 1 && all[0].dim() == whole_dim ? all[0][e] : all[static_cast<size_t>(e)];
}

inline std::vector<int64_t> expert_of_rows(const Counts& counts) {
  std::vector<int64_t> experts;
  for (size_t e = 0; e < counts.size(); ++e) experts.insert(experts.end(), counts[e], static_cast<int64_t>(e));
  return experts;
}

inline double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 2e-5 : 4e-2;
}

// Norm-wise, and to the last bit where all of b is zero. `what` names the case. What cancels leaves its rounding.
inline void expect_near(const at::Tensor& a, const at::Tensor& b, double relative, const std::string& what) {
  ASSERT_TRUE(a.defined()) << what;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const double norm = f64(b).norm().item<double>();
  const double size = relative < 1e-9 || norm == 0 ? norm : norm + std::sqrt(static_cast<double>(b.numel()));
  EXPECT_LE((f64(a) - f64(b)).norm().item<double>(), relative * size) << what;
}

}  // namespace plumb::test

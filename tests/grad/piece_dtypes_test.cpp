// What is asked of a piece of any dtype is answered as one process would answer it, or refused by name: never by a number that is
// another one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <complex>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "grad/piece.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Question = std::function<at::Tensor(const at::Tensor& gradient)>;

const std::vector<std::pair<std::string, Question>> kQuestions = {
    {"sum", [](const at::Tensor& g) { return g.sum(); }},
    {"nansum", [](const at::Tensor& g) { return g.nansum(); }},
    {"mean", [](const at::Tensor& g) { return g.mean(); }},
    {"prod", [](const at::Tensor& g) { return g.prod(); }},
    {"count_nonzero", [](const at::Tensor& g) { return g.count_nonzero(); }},
    {"any", [](const at::Tensor& g) { return g.any(); }},
    {"all", [](const at::Tensor& g) { return g.all(); }},
    {"max", [](const at::Tensor& g) { return g.max(); }},
    {"amin", [](const at::Tensor& g) { return g.amin(); }},
    {"aminmax", [](const at::Tensor& g) { return std::get<1>(g.aminmax()); }},
    {"norm", [](const at::Tensor& g) { return g.norm(); }},
    {"norm", [](const at::Tensor& g) { return g.norm(std::numeric_limits<double>::infinity()); }},
    {"linalg_vector_norm", [](const at::Tensor& g) { return at::linalg_vector_norm(g, 3); }},
    {"var", [](const at::Tensor& g) { return g.var(/*unbiased=*/false); }},
    {"std", [](const at::Tensor& g) { return g.std(/*unbiased=*/true); }},
    {"var_mean", [](const at::Tensor& g) { return std::get<1>(at::var_mean(g, /*unbiased=*/true)); }},
    {"std_mean", [](const at::Tensor& g) { return std::get<0>(at::std_mean(g, /*unbiased=*/true)); }},
    {"_foreach_norm", [](const at::Tensor& g) { return at::_foreach_norm({g, g}, 2)[1]; }},
    {"_foreach_norm", [](const at::Tensor& g) { return at::_foreach_norm({g}, 0)[0]; }},
    {"_foreach_max", [](const at::Tensor& g) { return at::_foreach_max({g})[0]; }},
};

// What one process would answer, and a piece does not.
bool is_refused(const std::string& name, at::ScalarType dtype) {
  if (name == "_foreach_max") return c10::isIntegralType(dtype, /*includeBool=*/true);
  if (!c10::isComplexType(dtype)) return false;
  return name == "prod" || name.starts_with("var") || name.starts_with("std");
}

// Element by element, so a piece of it is a piece. Complex numbers are of two parts that differ.
at::Tensor as(const at::Tensor& gradient, at::ScalarType dtype) {
  const at::Tensor as_is = gradient.to(dtype);
  return c10::isComplexType(dtype) ? as_is + as_is.square() * c10::complex<double>(0, 0.125) : as_is;
}

struct Answer {
  std::optional<at::ScalarType> dtype;  // without one there is an error
  std::complex<double> number;
  std::string error;
};

Answer ask(const Question& question, const at::Tensor& gradient) {
  try {
    const at::Tensor number = question(gradient);
    const auto value = number.to(at::kComplexDouble).item<c10::complex<double>>();
    return {number.scalar_type(), {value.real(), value.imag()}, ""};
  } catch (const std::exception& error) {
    return {std::nullopt, {}, error.what()};
  }
}

class PieceOfDtype : public testing::TestWithParam<std::tuple<at::ScalarType, int>> {};

TEST_P(PieceOfDtype, AnswersAsOneProcessOrRefuses) {
  const auto [dtype, ranks] = GetParam();
  // Of both signs, with zeros, and small enough for products; the last rank's part is shorter.
  const at::Tensor wanted = ((torch::arange(51, at::kFloat) * 7) % 5 - 2).view({3, 17});
  const double digits = dtype == at::kBFloat16 ? 1e-2 : dtype == at::kHalf ? 2e-3 : 2e-6;
  run_local(ranks, [&, dtype = dtype](World world) {
    at::Tensor p = torch::zeros({3, 17}, torch::requires_grad());
    Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
    (p * wanted).sum().backward();
    const at::Tensor piece = as(p.grad(), dtype), whole = as(wanted, dtype);
    ASSERT_TRUE(piece_of(piece));
    for (const auto& [name, question] : kQuestions) {
      const Answer expected = ask(question, whole), found = ask(question, piece);
      if (!expected.dtype || is_refused(name, dtype)) {
        EXPECT_FALSE(found.dtype) << name << " of " << dtype << " gave " << found.number;
        EXPECT_TRUE(!expected.dtype || found.error.find("'p'") != std::string::npos) << name << ": " << found.error;
        continue;
      }
      ASSERT_TRUE(found.dtype) << name << " of " << dtype << ": " << found.error;
      EXPECT_EQ(*found.dtype, *expected.dtype) << name << " of " << dtype;
      EXPECT_LE(std::abs(found.number - expected.number), digits * (1 + std::abs(expected.number)))
          << name << " of " << dtype << ": " << found.number << " instead of " << expected.number;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PieceOfDtype,
                         testing::Combine(testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt,
                                                          at::kLong, at::kByte, at::kBool, at::kComplexFloat,
                                                          at::kComplexDouble),
                                          testing::Values(2, 3)),
                         [](const auto& info) {
                           return std::string(c10::toString(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace plumb

// Parameters over one memory: two that share an element are refused, others are trained, however they lie between each other.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "plumb/plumb.h"

namespace plumb {
namespace {

// Rows of `length` elements, `apart` from each other, from `begin` on.
struct View {
  int64_t begin, rows, length, apart;
};

std::set<int64_t> elements_of(const View& view) {
  std::set<int64_t> all;
  for (int64_t row = 0; row < view.rows; ++row) {
    for (int64_t i = 0; i < view.length; ++i) all.insert(view.begin + row * view.apart + i);
  }
  return all;
}

TEST(SharedMemory, IsFoundInAnySetOfViewsAndNowhereElse) {
  int refused = 0, taken = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    std::mt19937_64 random(seed);
    const auto pick = [&](int64_t least, int64_t most) { return std::uniform_int_distribution(least, most)(random); };
    const at::Tensor memory = at::zeros({64}, seed % 2 ? at::kFloat : at::kDouble);
    NamedTensors named;
    std::set<int64_t> taken_elements;
    bool shares = false;
    for (int64_t count = pick(2, 4); count > 0; --count) {
      View view{pick(0, 40), pick(1, 4), pick(1, 5), 0};
      view.apart = view.length + pick(0, 3);
      while (view.begin + view.rows * view.apart > 64) --view.begin;
      for (const int64_t element : elements_of(view)) shares = !taken_elements.insert(element).second || shares;
      const at::Tensor tensor = memory.as_strided({view.rows, view.length}, {view.apart, 1}, view.begin);
      named.emplace_back("p" + std::to_string(count), tensor.detach().requires_grad_());
    }
    std::string said;
    try {
      Engine engine(World(), named, {}, SGD{});
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_EQ(shares, said.find("share memory") != std::string::npos) << "seed " << seed << ": " << said;
    ++(shares ? refused : taken);
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(taken, 20);
}

}  // namespace
}  // namespace plumb

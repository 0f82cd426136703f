// What is done to pieces of sharded gradients gives what one process would get.
#include <gtest/gtest.h>
#include "libtorch.h"

#include <limits>

#include "grad/piece.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Sizes over which cuts fall inside parameters, between them, and beside empty and single ones.
const std::vector<std::vector<int64_t>> kShapes = {{3, 5}, {7}, {}, {2, 3, 2}, {0}, {1}, {16}, {33}};

struct Inside : torch::nn::Module {
  Inside(size_t begin, size_t end, at::ScalarType dtype) {
    for (size_t i = begin; i < end; ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::zeros(kShapes[i], dtype)));
    }
  }
  at::Tensor forward(const std::function<at::Tensor(const at::Tensor& weight)>& use) {
    at::Tensor sum = torch::zeros({});
    for (const at::Tensor& weight : weights) sum = sum + use(weight);
    return sum;
  }
  std::vector<at::Tensor> weights;
};

// Two units, where parameters are sharded, too.
struct Bag : torch::nn::Module {
  explicit Bag(at::ScalarType dtype) {
    front = register_module("front", std::make_shared<Inside>(0, 4, dtype));
    back = register_module("back", std::make_shared<Inside>(4, kShapes.size(), dtype));
    for (auto* unit : {&front, &back}) {
      const auto& inside = (*unit)->weights;
      weights.insert(weights.end(), inside.begin(), inside.end());
    }
  }
  // Rank r's gradient of every element is another number, of both signs, and some are zero.
  void backward(int rank) {
    size_t i = 0;
    const auto use = [&](const at::Tensor& weight) { return (weight.to(at::kFloat) * wanted(i++, rank)).sum(); };
    const at::Tensor first = front->forward(use);
    (first + back->forward(use)).backward();
  }
  at::Tensor wanted(size_t i, int rank) const {
    const int64_t numel = weights[i].numel();
    const at::Tensor row = torch::arange(numel, at::kFloat);
    return ((row * 7 + static_cast<double>(i) * 3) % 11 - 4 + rank * (row.remainder(3) - 1)).view(weights[i].sizes());
  }
  Unit<Inside> front{nullptr}, back{nullptr};
  std::vector<at::Tensor> weights;
};

struct Setting {
  std::string strategy;
  int ranks;
  at::ScalarType dtype;
};

class PieceIn : public testing::TestWithParam<std::tuple<std::string, int, at::ScalarType>> {
 protected:
  Setting setting() const { return {std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())}; }

  // The same program on every rank's gradients and on whole ones in one process; then all gradients are compared.
  void compare(const std::function<std::vector<double>(std::vector<at::Tensor>& parameters)>& program) const {
    const Setting now = setting();
    Bag one(now.dtype);
    for (size_t i = 0; i < one.weights.size(); ++i) {
      at::Tensor sum = torch::zeros(one.weights[i].sizes());
      for (int rank = 0; rank < now.ranks; ++rank) sum += one.wanted(i, rank);
      one.weights[i].mutable_grad() = (sum / now.ranks).to(now.dtype);
    }
    const std::vector<double> expected = program(one.weights);
    const double tolerance = now.dtype == at::kBFloat16 ? 2e-2 : 2e-6;
    run_local(now.ranks,
              [&](World world) {
                Bag bag(now.dtype);
                Options options;
                options.strategy = now.strategy;
                options.bucket_bytes = options.first_bucket_bytes = 200;
                if (now.strategy == "hsdp" && now.ranks == 4) options.mesh = {.replicate = 2, .shard = 2};
                Engine engine(world, bag, SGD{.lr = 1}, options);
                bag.backward(world.rank());
                const std::vector<double> found = program(bag.weights);
                ASSERT_EQ(found.size(), expected.size());
                for (size_t i = 0; i < found.size(); ++i) {
                  if (std::isnan(expected[i])) {
                    EXPECT_TRUE(std::isnan(found[i]))
                        << "number " << i << " on rank " << world.rank() << ": " << found[i];
                  } else if (found[i] != expected[i]) {
                    EXPECT_NEAR(found[i], expected[i], tolerance * (1 + std::abs(expected[i])))
                        << "number " << i << " on rank " << world.rank();
                  }
                }
                engine.step();
                for (size_t i = 0; i < bag.weights.size(); ++i) {
                  const at::Tensor whole = engine.full_gradient(bag.weights[i]);
                  const at::Tensor parameter = engine.full_parameter(bag.weights[i]);
                  ASSERT_EQ(whole.defined(), one.weights[i].grad().defined()) << "w" << i;
                  if (!whole.defined()) continue;
                  const at::Tensor reference = one.weights[i].grad();
                  EXPECT_TRUE(at::allclose(whole.to(at::kDouble), reference.to(at::kDouble), tolerance, tolerance))
                      << "w" << i << " on rank " << world.rank() << ": " << whole << "\ninstead of " << reference;
                  EXPECT_TRUE(at::allclose(parameter.to(at::kDouble), -reference.to(at::kDouble), tolerance, tolerance))
                      << "w" << i;
                }
              },
              {.timeout = std::chrono::seconds(60)});
  }
};

TEST_P(PieceIn, ClippingByTheNormOfAllIsThatOfOneProcess) {
  for (const double order : {2.0, 1.0, kInfinity, 3.0}) {
    compare([&](std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> filled;  // libtorch's own has no inf-norm of nothing
      for (const at::Tensor& p : parameters) {
        if (p.numel() > 0 || order != kInfinity) filled.push_back(p);
      }
      return std::vector<double>{torch::nn::utils::clip_grad_norm_(filled, 1.0, order)};
    });
  }
}

TEST_P(PieceIn, ClippingOneParameterLeavesTheOthersAlone) {
  for (const size_t which : {0, 1, 3, 5, 7}) {
    compare([&](std::vector<at::Tensor>& parameters) {
      return std::vector<double>{torch::nn::utils::clip_grad_norm_(parameters[which], 0.5)};
    });
  }
}

TEST_P(PieceIn, ClippingByValueIsThatOfOneProcess) {
  compare([](std::vector<at::Tensor>& parameters) {
    torch::nn::utils::clip_grad_value_(parameters, 1.5);
    return std::vector<double>{};
  });
}

TEST_P(PieceIn, NormalisingEveryGradientByItselfIsThatOfOneProcess) {
  compare([](std::vector<at::Tensor>& parameters) {
    for (at::Tensor& p : parameters) {
      if (p.numel() == 0) continue;
      p.mutable_grad() /= p.grad().norm() + 1e-3;
      p.mutable_grad() -= p.grad().mean();
      if (p.numel() > 1) p.mutable_grad() = p.grad() / (p.grad().std() + 1);
      if (p.numel() == 1) p.mutable_grad().add_(p.grad().item<double>());
    }
    return std::vector<double>{};
  });
}

// What Python's clip_grad_norm_ and get_total_norm do.
TEST_P(PieceIn, ClippingThroughListsIsThatOfOneProcess) {
  for (const double order : {2.0, 1.0, 0.0, kInfinity}) {
    compare([&](std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& p : parameters) {
        if (p.numel() > 0) gradients.push_back(p.grad());
      }
      const at::Tensor total = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, order)), order);
      at::_foreach_mul_(gradients, (1.0 / (total + 1e-6)).clamp_max(1.0));
      const at::Tensor most = at::stack(at::_foreach_max(gradients)).max();
      const at::Tensor wide = at::stack(at::_foreach_norm(gradients, order, at::kDouble)).sum();
      EXPECT_EQ(wide.scalar_type(), at::kDouble);
      return std::vector<double>{total.item<double>(), most.item<double>(), wide.item<double>()};
    });
  }
}

// What GradScaler does, with numbers that are not finite on one rank alone.
TEST_P(PieceIn, UnscalingIsThatOfOneProcess) {
  for (const double bad : {0.0, kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    compare([&](std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& p : parameters) gradients.push_back(p.grad());
      // In one element of one parameter: only one rank holds it.
      gradients[7].add_(at::where(gradients[7] == gradients[7].max(), bad, 0.0));
      const at::Tensor found = torch::zeros({1}), scale = torch::full({}, 0.25);
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, const_cast<at::Tensor&>(found), scale);
      const double finite = gradients[7].isfinite().all().item<bool>();
      for (at::Tensor& gradient : gradients) gradient.nan_to_num_(1.0, 2.0, 3.0);
      return std::vector<double>{found.item<double>(), finite};
    });
  }
}

TEST_P(PieceIn, EveryFullReductionIsThatOfOneProcess) {
  compare([](std::vector<at::Tensor>& parameters) {
    std::vector<double> numbers;
    const auto say = [&](const at::Tensor& number) {
      EXPECT_EQ(number.dim(), 0);
      numbers.push_back(number.to(at::kDouble).item<double>());
    };
    for (const at::Tensor& p : parameters) {
      const at::Tensor& g = p.grad();
      say(g.sum());
      say(g.mean());
      say(g.nansum());
      say(g.count_nonzero());
      say(g.isnan().any());
      say(g.isfinite().all());
      say((g > 100).any());
      say((g > -100).all());
      say((g > 0).sum());
      for (const double order : {0.0, 1.0, 2.0, 2.5}) say(g.norm(order));
      say(at::linalg_vector_norm(g, 2, std::nullopt, false, at::kDouble));
      say(at::linalg_norm(g));
      if (p.dim() == 1) say(at::linalg_norm(g, 3));  // of a vector; a matrix is refused
      if (g.numel() == 0 && p.numel() == 0) continue;
      say(g.max());
      say(g.min());
      say(g.amax());
      say(g.amin());
      say((g * 3).to(at::kInt).max());
      say((g != g).max());
      const auto [low, high] = g.aminmax();
      say(low);
      say(high);
      say(g.norm(kInfinity));
      say(g.norm(-kInfinity));
      say(at::linalg_vector_norm(g.add(0.25), -1));
      say(g.div(4).prod());
      say(g.var(/*unbiased=*/false));
      say(g.var(/*unbiased=*/true));
      say(g.std(/*unbiased=*/false));
      say(std::get<1>(at::std_mean(g, /*unbiased=*/false)));
      if (p.numel() == 1) numbers.insert(numbers.end(), {g.item<double>(), 1.0 * g.is_nonzero()});
      std::vector<int64_t> all(p.dim());
      for (int64_t i = 0; i < p.dim(); ++i) all[i] = i;
      say(g.sum(all));
    }
    return numbers;
  });
}

TEST_P(PieceIn, ElementwiseProgramsAreThoseOfOneProcess) {
  compare([](std::vector<at::Tensor>& parameters) {
    for (at::Tensor& p : parameters) {
      at::Tensor& g = p.mutable_grad();
      const at::Tensor average = at::zeros_like(g).lerp_(g, 0.5), kept = g.clone();
      g = at::where(g > 0, g.square(), -g).addcmul(average, average, 0.1).detach();
      g.masked_fill_(g > 9, 9).clamp_min_(-3).mul_(kept.abs().add(1).reciprocal());
      g.flatten().add_(1);
      g.copy_(g.to(at::kDouble).view({-1}).neg().view_as(g));
      g.add_(at::full_like(g, 0.5)).sub_(torch::full({}, 0.25)).div_(torch::full({}, 2.0));
      // A plain number that only takes a piece's dtype is plain still.
      g.mul_(torch::full({}, 0.75, at::kDouble).to(g)).mul_(torch::full({}, 2, at::kLong).type_as(g));
      EXPECT_TRUE(g.equal(g.clone()));
      EXPECT_FALSE(p.numel() > 0 && g.equal(g + 1));
      EXPECT_TRUE(at::allclose(g, g + 1e-12));
    }
    return std::vector<double>{};
  });
}

// Also where a rank has nothing of some of them.
TEST_P(PieceIn, ExtremaOfNumbersBelowZeroAreAmongThem) {
  compare([](std::vector<at::Tensor>& parameters) {
    std::vector<at::Tensor> below;
    std::vector<double> numbers;
    for (const at::Tensor& p : parameters) {
      if (p.numel() == 0) continue;
      below.push_back(p.grad().abs().add(1).neg());
      numbers.push_back(at::linalg_vector_norm(below.back(), -kInfinity).item<double>());
      numbers.push_back(below.back().max().item<double>());
    }
    for (const at::Tensor& largest : at::_foreach_max(below)) numbers.push_back(largest.item<double>());
    for (const at::Tensor& least : at::_foreach_norm(below, kInfinity)) numbers.push_back(least.item<double>());
    return numbers;
  });
}

TEST_P(PieceIn, AGradientReplacedByAComputedOneIsTakenAsThat) {
  compare([](std::vector<at::Tensor>& parameters) {
    for (at::Tensor& p : parameters) p.mutable_grad() = p.grad() * 0.5 + at::ones_like(p.grad());
    return std::vector<double>{};
  });
}

std::string name_of(const testing::TestParamInfo<std::tuple<std::string, int, at::ScalarType>>& info) {
  return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)) + "_" +
         c10::toString(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Strategies, PieceIn,
                         testing::Combine(testing::Values("ddp", "zero2", "zero3", "hsdp"), testing::Values(1, 2, 3, 4),
                                          testing::Values(at::kFloat, at::kBFloat16)),
                         name_of);

}  // namespace
}  // namespace plumb

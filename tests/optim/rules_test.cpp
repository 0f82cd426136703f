// Formulas, as properties against their plain re-computation in f64: schedules, groups, updates, exact sums.
#include "optim/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/support/plain.h"
#include "optim/exact.h"
#include "optim/rates.h"

namespace plumb {
namespace {

using namespace test;

// ---- schedules

TEST(Schedule, RisesLinearlyAndFallsAsACosineForEveryLength) {
  for (int64_t warmup = 0; warmup <= 6; ++warmup) {
    for (int64_t total = 0; total <= 14; ++total) {
      for (const double floor : {0.0, 0.1, 1.0}) {
        const Schedule schedule{warmup, total, floor};
        for (int64_t step = 0; step <= 20; ++step) {
          SCOPED_TRACE(c10::str("warmup ", warmup, ", total ", total, ", floor ", floor, ", step ", step));
          double wanted = 1;
          if (step < warmup) {
            wanted = (1.0 + static_cast<double>(step)) / static_cast<double>(warmup);
          } else if (total > warmup) {
            // From 1 at the end of the warm-up down to the floor at `total`, and there for good.
            const double x = static_cast<double>(std::min(step, total) - warmup) / static_cast<double>(total - warmup);
            const double half = std::cos(M_PI * x / 2);  // (1 + cos t) / 2 = cos² (t / 2)
            wanted = floor + (1 - floor) * half * half;
          }
          EXPECT_NEAR(schedule.factor(step), wanted, 1e-12);
        }
      }
    }
  }
}

// ---- groups

TEST(Rates, AreThoseOfTheFirstGroupThatMatches) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    NamedTensors parameters;
    for (int i = 0; i < 6; ++i) parameters.emplace_back("p" + std::to_string(i), at::Tensor());
    Options options;
    std::vector<std::vector<bool>> members;
    const int64_t count = draw.whole(0, 4);
    for (int64_t g = 0; g < count; ++g) {
      std::vector<bool> mine;
      for (size_t i = 0; i < parameters.size(); ++i) mine.push_back(draw.one_in(2));
      mine[draw.whole(0, 5)] = true;
      const auto value = [&]() -> std::optional<double> {
        if (draw.one_in(2)) return std::nullopt;
        return draw.of<double>({0.0, 0.5, 2.0});
      };
      options.groups.push_back({[mine](const std::string& name) { return mine[name[1] - '0']; }, value(), value()});
      members.push_back(mine);
    }
    Rates rates(0, SGD{.lr = 0.25, .weight_decay = 0.125}, options, parameters);
    EXPECT_EQ(rates.grouped(), count > 0);
    double own = 0.25;
    std::vector<std::optional<double>> lrs;
    for (const auto& group : options.groups) lrs.push_back(group.lr);
    for (int change = 0; change < 4; ++change) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        Rates::Values wanted{own, 0.125};
        for (int64_t g = 0; g < count; ++g) {
          if (!members[g][i]) continue;
          if (lrs[g]) wanted.lr = *lrs[g];
          if (options.groups[g].weight_decay) wanted.weight_decay = *options.groups[g].weight_decay;
          break;
        }
        EXPECT_EQ(rates.of(parameters[i].first), wanted) << parameters[i].first;
      }
      std::vector<std::pair<std::string, double>> settings = {{"lr", own}};
      for (int64_t g = 0; g < count; ++g) {
        EXPECT_EQ(rates.lr(static_cast<int>(g)), lrs[g].value_or(own));
        settings.emplace_back("the lr of group " + std::to_string(g), lrs[g].value_or(own));
      }
      EXPECT_EQ(rates.settings(), settings);
      if (count == 0 || draw.one_in(2)) {
        rates.set_lr(own = draw.real(0, 1));
      } else {
        const auto group = static_cast<int>(draw.whole(0, count - 1));
        rates.set_lr(group, *(lrs[group] = draw.real(0, 1)));
      }
    }
  }
}

TEST(Rates, OfNoSenseAreRefusedAndNothingIsChanged) {
  const NamedTensors parameters = {{"a", at::Tensor()}, {"b", at::Tensor()}};
  const auto is = [](const std::string& one) { return [=](const std::string& name) { return name == one; }; };
  const auto built = [&](std::vector<ParameterGroup> groups, const Optimizer& optimizer = SGD{}) -> std::string {
    try {
      Options options;
      options.groups = std::move(groups);
      const Rates rates(3, optimizer, options, parameters);
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_EQ(built({{is("a"), 0.0, 0.0}, {is("b"), {}, {}}}), "none");
  using testing::AllOf;
  using testing::HasSubstr;
  EXPECT_THAT(built({{is("a"), {}, {}}, {nullptr, {}, {}}}), AllOf(HasSubstr("group 1"), HasSubstr("`match`")));
  EXPECT_THAT(built({{is("c"), {}, {}}}), HasSubstr("group 0 matches no parameter"));
  EXPECT_THAT(built({{is("a"), {}, {}}, {is("a"), -0.1, {}}}), HasSubstr("group 1 has lr -0.1"));
  EXPECT_THAT(built({{is("a"), NAN, {}}}), HasSubstr("group 0 has lr nan"));
  EXPECT_THAT(built({{is("b"), {}, -1.0}}), HasSubstr("group 0 has weight_decay -1"));
  EXPECT_THAT(built({{is("b"), {}, NAN}}), HasSubstr("group 0 has weight_decay nan"));
  EXPECT_THAT(built({}, SGD{.lr = -1}), HasSubstr("learning rate"));
  EXPECT_THAT(built({}, AdamW{.lr = NAN}), HasSubstr("learning rate"));
  EXPECT_THAT(built({}, Adam{.eps = NAN}), HasSubstr("eps"));

  Options options;
  options.groups = {{is("a"), 0.5, 0.25}, {[](const std::string&) { return true; }, {}, {}}};
  Rates rates(0, SGD{.lr = 0.125, .weight_decay = 0.75}, options, parameters);
  const auto refused = [&](const std::function<void()>& call) -> std::string {
    const auto before = rates.settings();
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(rates.settings(), before);
      return error.what();
    }
    return "none";
  };
  for (const int group : {-1, 2, 3}) {
    const auto none = AllOf(HasSubstr(c10::str("no parameter group ", group)), HasSubstr("has 2"));
    EXPECT_THAT(refused([&] { rates.lr(group); }), none);
    EXPECT_THAT(refused([&] { rates.set_lr(group, 1); }), none);
  }
  for (const double bad : {-0.5, std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    EXPECT_THAT(refused([&] { rates.set_lr(bad); }), HasSubstr("must be finite and not negative"));
    EXPECT_THAT(refused([&] { rates.set_lr(1, bad); }), HasSubstr("must be finite and not negative"));
  }
  EXPECT_EQ(refused([&] { rates.set_lr(0); }), "none");
  EXPECT_EQ(refused([&] { rates.set_lr(1, 0); }), "none");
  EXPECT_EQ(rates.of("a"), (Rates::Values{0.5, 0.25}));
  EXPECT_EQ(rates.of("b"), (Rates::Values{0, 0.75}));
  EXPECT_THAT(rates.group_lrs(), testing::ElementsAre(0.5, 0));
  for (const Optimizer& none : {Optimizer(NoOptimizer{}), Optimizer(UserOptimizer{})}) {
    Rates idle(0, none, {}, parameters);
    EXPECT_EQ(idle.lr(), 0);
    EXPECT_EQ(idle.of("a"), (Rates::Values{0, 0}));
    EXPECT_THAT([&] { idle.set_lr(1); }, testing::ThrowsMessage<Error>(HasSubstr("without an optimizer")));
  }
  // Each optimizer's own.
  EXPECT_EQ(Rates(0, Adam{.lr = 0.5, .weight_decay = 2}, {}, parameters).of("a"), (Rates::Values{0.5, 2}));
  EXPECT_EQ(Rates(0, AdamW{.lr = 0.5, .weight_decay = 2}, {}, parameters).of("a"), (Rates::Values{0.5, 2}));
  EXPECT_EQ(Rates(0, RMSprop{.lr = 0.5, .weight_decay = 2}, {}, parameters).of("a"), (Rates::Values{0.5, 2}));
}

// ---- updates

// Ours and the plain one over several steps with changing rates; the final weights of both.
std::pair<at::Tensor, at::Tensor> run(const Optimizer& optimizer, uint64_t seed, double lr, double decay) {
  constexpr int64_t size = 37;
  at::Tensor weight = noise({size}, seed), plain_weight = weight.clone();
  Plain plain(optimizer);
  const Moments moments = moments_of(optimizer);
  Operands run;
  run.weight = weight;
  if (moments.momentum) run.momentum = at::zeros({size}, at::kDouble);
  if (moments.mean) run.mean = at::zeros({size}, at::kDouble);
  if (moments.square) run.square = at::zeros({size}, at::kDouble);
  for (int step = 0; step < 6; ++step) {
    const at::Tensor gradient = noise({size}, seed + 1 + step);
    run.gradient = gradient.clone();
    run.first = step == 0;
    run.lr = lr * (1 + 0.1 * step);
    run.weight_decay = decay;
    if (counts_updates(optimizer)) run.count = at::full({}, step + 1, at::kFloat);
    update(optimizer, {run});
    EXPECT_TRUE(run.gradient.equal(gradient)) << "a gradient is only read";
    plain.update(plain_weight, gradient, run.lr, decay);
  }
  return {weight, plain_weight};
}

TEST(Rules, EqualTheirFormulasForDrawnValues) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Draw draw(seed);
    const Optimizer optimizer = any_optimizer(draw);
    const auto [found, wanted] = run(optimizer, seed, draw.real(0.001, 0.3), draw.of<double>({0, 0.1}));
    EXPECT_LT(distance(found, wanted), 1e-10) << "seed " << seed << ", optimizer " << optimizer.index();
  }
}

// Each value alone: it matters, and as the formula says.
TEST(Rules, EveryValueCounts) {
  const std::vector<std::pair<std::string, std::pair<Optimizer, Optimizer>>> changes = {
      {"AdamW beta1", {AdamW{.beta1 = 0.9}, AdamW{.beta1 = 0.8}}},
      {"AdamW beta2", {AdamW{.beta2 = 0.99}, AdamW{.beta2 = 0.9}}},
      {"AdamW eps", {AdamW{.eps = 1e-8}, AdamW{.eps = 0.1}}},
      {"Adam beta1", {Adam{.beta1 = 0.9}, Adam{.beta1 = 0.8}}},
      {"Adam beta2", {Adam{.beta2 = 0.99}, Adam{.beta2 = 0.9}}},
      {"Adam eps", {Adam{.eps = 1e-8}, Adam{.eps = 0.1}}},
      {"SGD momentum", {SGD{.momentum = 0.9}, SGD{.momentum = 0.5}}},
      {"SGD any momentum", {SGD{}, SGD{.momentum = 0.5}}},
      {"SGD dampening", {SGD{.momentum = 0.9}, SGD{.momentum = 0.9, .dampening = 0.5}}},
      {"SGD nesterov", {SGD{.momentum = 0.9}, SGD{.momentum = 0.9, .nesterov = true}}},
      {"RMSprop alpha", {RMSprop{.alpha = 0.99}, RMSprop{.alpha = 0.9}}},
      {"RMSprop eps", {RMSprop{.eps = 1e-2}, RMSprop{.eps = 0.1}}},
      {"RMSprop momentum", {RMSprop{.momentum = 0.5}, RMSprop{.momentum = 0.9}}},
      {"RMSprop any momentum", {RMSprop{}, RMSprop{.momentum = 0.9}}},
      {"RMSprop centered", {RMSprop{.eps = 1e-2}, RMSprop{.eps = 1e-2, .centered = true}}},
      {"Adam and AdamW", {Adam{}, AdamW{}}},
  };
  for (const auto& [name, pair] : changes) {
    const auto [found, wanted] = run(pair.first, 7, 0.05, 0.1);
    const auto [found_too, wanted_too] = run(pair.second, 7, 0.05, 0.1);
    EXPECT_LT(distance(found, wanted), 1e-10) << name;
    EXPECT_LT(distance(found_too, wanted_too), 1e-10) << name;
    EXPECT_GT(distance(found, found_too), 1e-5) << name << " makes no difference";
  }
  for (const Optimizer& one : {Optimizer(AdamW{}), Optimizer(Adam{}), Optimizer(SGD{}), Optimizer(RMSprop{})}) {
    EXPECT_GT(distance(run(one, 7, 0.05, 0.1).first, run(one, 7, 0.04, 0.1).first), 1e-5) << one.index();
    EXPECT_GT(distance(run(one, 7, 0.05, 0.1).first, run(one, 7, 0.05, 0.2).first), 1e-5) << one.index();
  }
}

// Runs of one call that differ in rate, decay, dtype, count or in being the first: each is updated by its own.
TEST(Rules, UpdateManyRunsAtOnceAsEachAlone) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    const Optimizer optimizer = any_optimizer(draw);
    const Moments moments = moments_of(optimizer);
    struct One {
      Operands run;
      at::Tensor wanted;
      Plain plain;
      int64_t count = 0;
    };
    std::vector<One> all;
    for (int64_t i = draw.whole(1, 6); i > 0; --i) {
      const auto dtype = draw.of<at::ScalarType>({at::kDouble, at::kFloat});
      const int64_t size = draw.whole(1, 40);
      One& one = all.emplace_back(One{{}, noise({size}, seed * 10 + i).to(dtype).to(at::kDouble), Plain(optimizer)});
      one.run.weight = one.wanted.to(dtype, /*non_blocking=*/false, /*copy=*/true);
      if (moments.momentum) one.run.momentum = at::zeros({size}, dtype);
      if (moments.mean) one.run.mean = at::zeros({size}, dtype);
      if (moments.square) one.run.square = at::zeros({size}, dtype);
    }
    for (int step = 0; step < 5; ++step) {
      std::vector<Operands> runs;
      for (One& one : all) {
        if (draw.one_in(3)) continue;
        const at::Tensor gradient = noise(one.wanted.sizes(), draw.whole(0, 1 << 20));
        one.run.gradient = gradient.to(one.run.weight.scalar_type());
        one.run.first = one.count++ == 0;
        one.run.lr = draw.of<double>({0.01, 0.02});
        one.run.weight_decay = draw.of<double>({0.0, 0.1, 0.2});
        if (counts_updates(optimizer)) one.run.count = at::full({}, one.count, at::kFloat);
        one.plain.update(one.wanted, one.run.gradient.to(at::kDouble), one.run.lr, one.run.weight_decay);
        runs.push_back(one.run);
      }
      update(optimizer, runs);
      for (const One& one : all) {
        const double tolerance = one.run.weight.scalar_type() == at::kDouble ? 1e-10 : 1e-4;
        ASSERT_LT(distance(one.run.weight, one.wanted), tolerance) << "optimizer " << optimizer.index() << ", " << step;
      }
    }
  }
}

TEST(Rules, RefuseValuesOutOfTheirRange) {
  const auto refused = [](const Optimizer& optimizer, const std::string& what) {
    EXPECT_THAT([&] { check_values(3, optimizer); },
                testing::ThrowsMessage<Error>(testing::AllOf(testing::HasSubstr(what), testing::HasSubstr("rank 3:"))));
  };
  refused(SGD{.lr = -1}, "learning rate");
  refused(SGD{.weight_decay = -1}, "weight decay");
  refused(SGD{.momentum = -0.1}, "momentum");
  refused(SGD{.nesterov = true}, "nesterov");
  refused(SGD{.momentum = 0.9, .dampening = 0.1, .nesterov = true}, "nesterov");
  refused(AdamW{.beta1 = 1.0}, "betas");
  refused(AdamW{.beta1 = -0.1}, "betas");
  refused(Adam{.beta2 = 1.0}, "betas");
  refused(Adam{.beta2 = -0.1}, "betas");
  refused(Adam{.eps = -1}, "eps");
  refused(RMSprop{.alpha = 1.1}, "alpha");
  refused(RMSprop{.alpha = -0.1}, "alpha");
  refused(RMSprop{.eps = -1}, "eps");
  refused(RMSprop{.momentum = -1}, "momentum");
  for (const Optimizer& good : std::vector<Optimizer>{SGD{.lr = 0}, SGD{.momentum = 0.9, .nesterov = true},
                                                      AdamW{.beta1 = 0, .beta2 = 0, .eps = 0}, RMSprop{.alpha = 1},
                                                      RMSprop{.alpha = 0}, NoOptimizer{}, UserOptimizer{}}) {
    EXPECT_NO_THROW(check_values(0, good));
  }
}

// Padding between parameters is zero everywhere, and stays zero.
TEST(Rules, LeaveZerosZero) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Draw draw(seed);
    const Optimizer optimizer = any_optimizer(draw);
    const auto zeros = [] { return at::zeros({4}, at::kDouble); };
    const Moments moments = moments_of(optimizer);
    const Operands run{zeros(),
                       zeros(),
                       moments.momentum ? zeros() : at::Tensor(),
                       moments.mean ? zeros() : at::Tensor(),
                       moments.square ? zeros() : at::Tensor(),
                       at::full({}, 1, at::kFloat),
                       true,
                       0.1,
                       0.1};
    update(optimizer, {run});
    for (const at::Tensor& one : {run.weight, run.momentum, run.mean, run.square}) {
      if (one.defined()) {
        EXPECT_EQ(one.abs().max().item<double>(), 0) << seed;
      }
    }
  }
}

// ---- exact sums

TEST(ExactSum, IsTheRoundedSumInEveryOrderAndCut) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    std::mt19937_64 shuffle(seed);
    // Within 2^±40, where the sum of whole multiples of 2^-100 is exact in 128 bits.
    std::vector<double> values;
    unsigned __int128 whole = 0;  // in units of 2^-60
    for (int64_t i = draw.whole(0, 60); i >= 0; --i) {
      const auto mantissa = static_cast<uint64_t>(draw.whole(0, (int64_t{1} << 53) - 1));
      const auto exponent = static_cast<int>(draw.whole(0, 50));
      values.push_back(std::ldexp(static_cast<double>(mantissa), exponent - 60));
      whole += static_cast<unsigned __int128>(mantissa) << exponent;
    }
    const double wanted = std::ldexp(static_cast<double>(whole), -60);
    ExactSum first;
    for (const double value : values) first.add(value);
    const double sum = first.value();
    EXPECT_NEAR(sum, wanted, std::abs(wanted) * 1e-15);
    std::shuffle(values.begin(), values.end(), shuffle);
    // Cut in three, the limbs added: the same bits.
    std::array<ExactSum, 3> parts;
    for (size_t i = 0; i < values.size(); ++i) parts[i % 3].add(values[i]);
    ExactSum joined;
    for (ExactSum& part : parts) {
      part.carry();
      for (size_t i = 0; i < part.limbs.size(); ++i) joined.limbs[i] += part.limbs[i];
    }
    EXPECT_EQ(joined.value(), sum);
  }
}

TEST(ExactSum, HoldsEveryDouble) {
  for (const double value : {0.0, 5e-324, 3e-310, std::numeric_limits<double>::min(), 1e-300, 1.0, 1e300, 1.7e308}) {
    ExactSum sum;
    sum.add(value);
    EXPECT_EQ(sum.value(), value);
  }
  // What one is lost beside the other in doubles is not lost here.
  ExactSum sum;
  for (int i = 0; i < 4; ++i) sum.add(0.25);
  sum.add(std::ldexp(1, 60));
  sum.add(std::ldexp(1, 53));
  EXPECT_EQ(sum.value(), std::ldexp(1, 60) + std::ldexp(1, 53));
  ExactSum small;
  small.add(1e16);
  for (int i = 0; i < 1000; ++i) small.add(0.5);
  EXPECT_EQ(small.value(), 1e16 + 500);
}

// As doubles add up: what is infinite wins over what is finite, and what is no number over both, in every order and cut.
TEST(ExactSum, IsInfiniteOrNoNumberAsASumOfDoublesIs) {
  for (int first = 0; first < 3; ++first) {
    for (int second = 0; second < 3; ++second) {
      for (const bool cut : {false, true}) {
        constexpr std::array values = {1.5, std::numeric_limits<double>::infinity(),
                                       std::numeric_limits<double>::quiet_NaN()};
        ExactSum sum, other;
        sum.add(values[first]);
        (cut ? other : sum).add(values[second]);
        for (size_t i = 0; i < sum.limbs.size(); ++i) sum.limbs[i] += other.limbs[i];
        const double wanted = values[first] + values[second], found = sum.value();
        EXPECT_TRUE(found == wanted || (std::isnan(found) && std::isnan(wanted))) << first << second << cut << found;
      }
    }
  }
}

}  // namespace
}  // namespace plumb

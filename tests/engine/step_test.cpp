// A step against its plain re-computation: drawn optimizers, groups, schedules, clipping, loss scales and patterns of
// gradients, in every strategy, on one to three ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;

struct Case {
  uint64_t seed = 0;
  int ranks = 1;
  Optimizer optimizer;
  Options options;
  bool holds = false;       // all backwards of a step but the last under no_sync
  bool first_held = false;  // all of the first step: the buckets take their order when there is state already
};

Case draw_case(uint64_t seed) {
  Draw draw(seed);
  Case one;
  one.seed = seed;
  one.ranks = static_cast<int>(draw.whole(1, 3));
  one.optimizer = any_optimizer(draw);
  Options& options = one.options;
  options.strategy = draw.of<std::string>({"ddp", "zero1", "zero2", "zero3", "hsdp"});
  options.bucket_bytes = draw.of<int64_t>({100, 400, 4 << 20});
  options.first_bucket_bytes = draw.of<int64_t>({100, 1 << 20});
  options.hold_unsharded = draw.one_in(3);
  if (draw.one_in(2)) options.clip_norm = draw.of<double>({0.5, 5.0, 1e9});
  if (draw.one_in(2)) {
    options.loss_scale = LossScale{draw.of<double>({1, 256, 65536}), draw.of<double>({1, 2}), 0.5, draw.whole(1, 3)};
  }
  if (draw.one_in(2)) options.schedule = {draw.whole(0, 3), draw.whole(0, 6), draw.of<double>({0.0, 0.1})};
  if (draw.one_in(2)) {
    const auto rate = [&]() -> std::optional<double> {
      return draw.one_in(3) ? std::nullopt : std::optional(draw.real(0, 0.1));
    };
    options.groups.push_back(
        {[](const std::string& name) { return name.ends_with("w1") || name == "outside.w0"; }, rate(), rate()});
    options.groups.push_back({[](const std::string& name) { return name.starts_with("outside"); }, rate(), rate()});
  }
  one.holds = draw.one_in(3);
  one.first_held = draw.one_in(2);
  return one;
}

double plain_factor(const Schedule& schedule, int64_t step) {
  if (step < schedule.warmup) return (step + 1.0) / static_cast<double>(schedule.warmup);
  if (schedule.total <= schedule.warmup) return 1;
  const double done =
      static_cast<double>(step - schedule.warmup) / static_cast<double>(schedule.total - schedule.warmup);
  return done >= 1 ? schedule.floor : schedule.floor + (1 - schedule.floor) * (1 + std::cos(M_PI * done)) / 2;
}

void play(const World& world, const Case& one) {
  SCOPED_TRACE(c10::str("seed ", one.seed, ": ", one.options.strategy, ", rank ", world.rank(), " of ", world.size(),
                        ", optimizer ", one.optimizer.index()));
  Draw draw(one.seed + 1);  // the same on every rank
  Parts model(one.seed);
  const Options& options = one.options;
  Engine engine(world, model, one.optimizer, options);
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  for (const auto& item : model.named_parameters()) {
    names.push_back(item.key());
    parameters.push_back(item.value());
  }
  // The reference.
  std::vector<at::Tensor> weights;
  {
    Parts again(one.seed);
    for (const auto& p : again.parameters()) weights.push_back(p.detach().clone());
  }
  std::vector<at::Tensor> gradients(weights.size());
  std::vector<Plain> plain(weights.size(), Plain(one.optimizer));
  auto [lr, decay] = std::visit(
      [](const auto& o) {
        if constexpr (requires { o.lr; }) return std::pair{o.lr, o.weight_decay};
        return std::pair{0.0, 0.0};
      },
      one.optimizer);
  std::vector<std::optional<double>> group_lrs;
  for (const auto& group : options.groups) group_lrs.push_back(group.lr);
  double scale = options.loss_scale ? options.loss_scale->initial : 1;
  int64_t good = 0;

  for (int64_t step = 0; step < 5; ++step) {
    SCOPED_TRACE(c10::str("step ", step));
    const int64_t micros = draw.whole(0, 3);
    const bool poisoned = options.loss_scale && draw.one_in(4);
    for (int64_t micro = 0; micro < micros; ++micro) {
      std::vector<at::Tensor> mine(weights.size());
      for (size_t i = 0; i < weights.size(); ++i) {
        if (draw.one_in(4)) continue;  // nobody has one
        const bool on_one_rank = draw.one_in(4);
        for (int rank = 0; rank < world.size(); ++rank) {
          if (on_one_rank && rank != world.size() - 1) continue;
          at::Tensor gradient = noise(weights[i].sizes(), one.seed * 1000 + step * 100 + micro * 30 + i * 3 + rank);
          if (poisoned && micro == 0 && rank == 0 && i == 0) gradient.view(-1)[0] = INFINITY;
          if (rank == world.rank()) mine[i] = gradient;
          gradients[i] = gradients[i].defined() ? gradients[i] + gradient / world.size() : gradient / world.size();
        }
      }
      const at::Tensor loss = model.loss(mine);
      std::optional<NoSync> quiet;
      if ((one.holds && micro + 1 < micros) || (one.first_held && step == 0)) quiet.emplace(engine);
      if (draw.one_in(2) || !loss.defined()) {
        engine.backward(loss);
      } else {
        engine.scale(loss).backward();
      }
    }
    if (draw.one_in(3)) engine.set_lr(lr = draw.real(0.001, 0.1));
    if (!group_lrs.empty() && draw.one_in(3)) {
      const auto group = static_cast<int>(draw.whole(0, 1));
      group_lrs[group] = draw.real(0.001, 0.1);
      engine.set_lr(group, *group_lrs[group]);
    }

    bool finite = true;
    double squares = 0;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined() || gradient.numel() == 0) continue;
      finite = finite && gradient.isfinite().all().item<bool>();
      squares += gradient.square().sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    if (finite && !(one.first_held && step == 0)) {
      EXPECT_NEAR(engine.grad_norm().item<double>(), norm, 1e-9 * norm + 1e-12);
      EXPECT_NEAR(engine.grad_norm().item<double>(), norm, 1e-9 * norm + 1e-12) << "asking changes nothing";
    }

    const StepInfo info = engine.step();
    const double factor = plain_factor(options.schedule, step);
    EXPECT_EQ(info.step, step);
    EXPECT_NEAR(info.lr, lr * factor, 1e-15);
    EXPECT_EQ(engine.lr(), lr);
    ASSERT_EQ(info.group_lrs.size(), group_lrs.size());
    for (size_t g = 0; g < group_lrs.size(); ++g) {
      EXPECT_EQ(engine.lr(static_cast<int>(g)), group_lrs[g].value_or(lr));
      EXPECT_NEAR(info.group_lrs[g], group_lrs[g].value_or(lr) * factor, 1e-15);
    }
    EXPECT_EQ(info.loss_scale, scale);
    const bool skipped = options.loss_scale && !finite;
    EXPECT_EQ(info.skipped, skipped);
    if (options.loss_scale) {
      const LossScale& rule = *options.loss_scale;
      if (skipped) {
        scale *= rule.backoff;
        good = 0;
      } else if (++good == rule.interval) {
        scale *= rule.growth;
        good = 0;
      }
    }
    EXPECT_EQ(info.grad_norm.defined(), options.clip_norm && !skipped);
    if (options.clip_norm && !skipped) {
      EXPECT_NEAR(info.grad_norm.item<double>(), norm, 1e-9 * norm + 1e-12);
      const double coefficient = *options.clip_norm / (norm + 1e-6);
      for (at::Tensor& gradient : gradients) {
        if (gradient.defined() && coefficient < 1) gradient = gradient * coefficient;
      }
    }
    for (size_t i = 0; i < weights.size() && !skipped; ++i) {
      if (!gradients[i].defined()) continue;
      double own_lr = lr, own_decay = decay;
      for (size_t g = 0; g < group_lrs.size(); ++g) {
        if (!options.groups[g].match(names[i])) continue;
        own_lr = group_lrs[g].value_or(lr);
        own_decay = options.groups[g].weight_decay.value_or(decay);
        break;
      }
      plain[i].update(weights[i], gradients[i], own_lr * factor, own_decay);
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_LT(distance(engine.full_parameter(parameters[i]), weights[i]), 1e-9) << names[i];
      const at::Tensor whole = engine.full_gradient(parameters[i]);
      ASSERT_EQ(whole.defined(), gradients[i].defined()) << names[i];
      if (whole.defined() && !skipped) {
        EXPECT_LT(distance(whole, gradients[i]), 1e-9) << names[i];
      }
    }
    if (skipped || draw.one_in(2)) {
      engine.zero_grad();
      for (at::Tensor& gradient : gradients) gradient.reset();
      for (const at::Tensor& p : parameters) EXPECT_FALSE(p.grad().defined());
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Step, EqualsItsPlainRecomputationWhateverWasChosen) {
  for (uint64_t seed = 1; seed <= 100 && !HasFailure(); ++seed) {
    const Case one = draw_case(seed);
    run_local(one.ranks, [&](World world) { play(world, one); });
  }
}

// The weight of a share: with it, the gradient is the mean over all shares, in the same bits on every number of ranks.
TEST(Step, OfDeterministicSharesIsTheirMeanWithTheShareWeight) {
  constexpr int kShares = 4;
  const at::Tensor start = noise({50}, 1);
  at::Tensor mean = at::zeros({50}, at::kDouble);
  for (int share = 0; share < kShares; ++share) mean += noise({50}, 10 + share) / kShares;
  at::Tensor first;
  for (const auto& [strategy, replicas] : {std::pair("ddp", 1), {"zero2", 1}, {"zero2", 2}, {"hsdp", 2}}) {
    for (const int ranks : {1, 2, 4}) {
      if (ranks < replicas) continue;
      run_local(ranks, [&](World world) {
        at::Tensor weight = start.clone().requires_grad_();
        Options options;
        options.strategy = strategy;
        options.mesh.replicate = replicas;
        options.deterministic = true;
        options.virtual_ranks = kShares;
        options.clip_norm = 1e9;
        Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, options);
        EXPECT_EQ(engine.share_weight(), static_cast<double>(ranks) / kShares);
        const int mine = kShares / ranks;
        for (int i = 0; i < mine; ++i) {
          engine.backward((weight * noise({50}, 10 + world.rank() * mine + i)).sum() * engine.share_weight());
        }
        const StepInfo info = engine.step();
        EXPECT_NEAR(info.grad_norm.item<double>(), mean.norm().item<double>(), 1e-12);
        const at::Tensor found = engine.full_parameter(weight);
        EXPECT_LT(distance(found, start - mean), 1e-12) << strategy << " on " << ranks;
        if (world.rank() != 0) return;
        if (!first.defined()) first = found;
        EXPECT_TRUE(found.equal(first)) << strategy << " on " << ranks;
      });
    }
  }
  at::Tensor weight = at::ones({1}).requires_grad_();
  EXPECT_EQ(Engine(World(), NamedTensors{{"w", weight}}, {}).share_weight(), 1);
}

// Buffers of every dtype, more than one message of them; rank 0's, after construction and every step.
TEST(Step, LeavesRankZerosBuffersEverywhere) {
  run_local(3, [](World world) {
    at::Tensor weight = at::ones({1}).requires_grad_();
    NamedTensors buffers;
    for (const auto dtype : {at::kFloat, at::kLong, at::kBool, at::kBFloat16, at::kDouble, at::kFloat}) {
      buffers.emplace_back(c10::str("b", buffers.size()), at::zeros({3, 2}, dtype));
    }
    buffers.emplace_back("large", at::zeros({3 << 20}));
    buffers.emplace_back("larger", at::zeros({5, 1 << 19}).t());
    buffers.emplace_back("empty", at::zeros({0}));
    buffers.emplace_back("scalar", at::zeros({}));
    const auto fill = [&](int value) {
      for (const auto& [name, buffer] : buffers)
        buffer.copy_(at::arange(buffer.numel()).view(buffer.sizes()).add(value));
    };
    const auto check = [&](int value) {
      for (const auto& [name, buffer] : buffers) {
        const at::Tensor wanted = at::arange(buffer.numel()).view(buffer.sizes()).add(value).to(buffer.scalar_type());
        EXPECT_TRUE(buffer.equal(wanted)) << name << " on rank " << world.rank();
      }
    };
    fill(world.rank());
    Engine engine(world, NamedTensors{{"w", weight}}, buffers, SGD{});
    check(0);
    for (int step = 0; step < 2; ++step) {
      fill(10 * step + 7 + world.rank());
      engine.backward(weight.sum());
      engine.step();
      check(10 * step + 7);
    }
  });
}

// What is gathered is whole; what rank 0 wrote is everybody's, what others wrote is gone, what only was read must not
// have been written.
TEST(Step, IsFollowedByGatheredParametersThatCanBeReadAndWritten) {
  for (const std::string strategy : {"ddp", "zero2", "zero3"}) {
    run_local(3, [&](World world) {
      Parts model(2);
      Options options;
      options.strategy = strategy;
      Engine engine(world, model, SGD{.lr = 1}, options);
      std::vector<at::Tensor> wanted;
      {
        Parts plain(2);
        for (const auto& p : plain.parameters()) wanted.push_back(p.detach().clone());
      }
      const auto parameters = model.parameters();
      const auto check = [&] {
        for (size_t i = 0; i < wanted.size(); ++i) {
          EXPECT_LT(distance(engine.full_parameter(parameters[i]), wanted[i]), 1e-12) << strategy << ", " << i;
        }
      };
      check();
      for (int round = 0; round < 2; ++round) {
        {
          const Gathered scope = engine.gathered({parameters[0], parameters[4]}, Access::write);
          EXPECT_TRUE(parameters[0].detach().equal(wanted[0]));
          at::NoGradGuard no_grad;
          for (const size_t i : {0, 4}) {
            parameters[i].add_(1.0 + world.rank());
            wanted[i] = wanted[i] + 1.0;
          }
        }
        check();
        std::vector<at::Tensor> gradients;
        for (const at::Tensor& one : wanted) gradients.push_back(at::ones_like(one));
        engine.backward(model.loss(gradients));
        engine.step();
        engine.zero_grad();
        for (at::Tensor& one : wanted) one = one - 1.0;
        check();
      }
      if (strategy != "zero3") return;
      const auto lost = [&] {
        const Gathered scope = engine.gathered({parameters[0]});
        at::NoGradGuard no_grad;
        parameters[0].add_(1);
      };
      try {
        lost();
        ADD_FAILURE() << "a change that nobody will see";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("'inside.w0' was changed"));
      }
    });
  }
}

// Of every parameter, whoever trains it still.
TEST(Step, IsFollowedByGradientsThatAreAllCleared) {
  for (const std::string strategy : {"ddp", "zero2", "zero3"}) {
    run_local(2, [&](World world) {
      Parts model(5);
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = strategy});
      engine.backward(model.loss(ones(1)));
      engine.step();
      for (const size_t frozen : {0, 4}) model.parameters()[frozen].set_requires_grad(false);
      engine.zero_grad();
      for (const at::Tensor& one : model.parameters()) EXPECT_FALSE(one.grad().defined()) << strategy;
    });
  }
}

}  // namespace
}  // namespace plumb

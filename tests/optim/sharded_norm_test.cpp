// Norms and looks over gradients that are parts: every rank has its own, and all hear the same of the whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "optim/norm.h"

namespace plumb {
namespace {

using namespace test;

// Buckets made by hand, of which a rank keeps its part; the same draws on every rank.
struct Buckets {
  std::deque<Sink> sinks;
  std::deque<Bucket> all;
  std::vector<at::Tensor> whole;  // by sink; undefined: it has no gradient

  Buckets(Draw& draw, at::ScalarType dtype, int rank, int ranks) {
    for (int64_t b = draw.whole(1, 3); b > 0; --b) {
      Bucket& bucket = all.emplace_back();
      bucket.index = static_cast<int>(all.size()) - 1;
      bucket.dtype = dtype;
      int64_t offset = 0;
      for (int64_t i = draw.whole(1, 4); i > 0; --i) {
        Sink& sink = sinks.emplace_back();
        sink.index = static_cast<int>(sinks.size()) - 1;
        sink.parameter = at::zeros({draw.one_in(5) ? 0 : draw.whole(1, 60)}, dtype).requires_grad_();
        sink.slot = {bucket.index, offset};
        offset += (sink.parameter.numel() + kAlignment - 1) / kAlignment * kAlignment;
        bucket.sinks.push_back(&sink);
        whole.push_back(draw.one_in(4) ? at::Tensor()
                                       : noise(sink.parameter.sizes(), draw.whole(0, 1 << 20)).to(dtype));
      }
      const int64_t unit = ranks * kAlignment;
      bucket.numel = std::max(unit, (offset + unit - 1) / unit * unit);
      bucket.kept = bucket.updated = bucket.held = owned(bucket.numel, rank, ranks);
      bucket.gradient = at::zeros({bucket.kept.size()}, dtype);
    }
    fill();
  }

  void fill() {
    at::NoGradGuard no_grad;
    for (Bucket& bucket : all) {
      for (Sink* sink : bucket.sinks) {
        const at::Tensor& value = whole[sink->index];
        const Range mine = overlap(sink->slot, sink->parameter.numel(), bucket.kept);
        const int64_t begin = std::clamp<int64_t>(mine.begin - bucket.kept.begin, 0, bucket.kept.size());
        sink->view = sink->shown = bucket.gradient.narrow(0, begin, mine.size());
        if (!value.defined()) {
          sink->view.fill_(7);  // old values lie around
          continue;
        }
        if (mine.size() > 0) sink->view.copy_(value.narrow(0, mine.begin - sink->slot.offset, mine.size()));
        sink->grad() = sink->shown;
      }
    }
  }

  double norm() const {
    double squares = 0;
    for (const at::Tensor& one : whole) {
      if (one.defined()) squares += one.to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(squares);
  }
};

TEST(ShardedNorm, IsThatOfAllPartsOnEveryRankAndOneElementSpoilsIt) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](World world) {
      Groups groups = new_groups(world, {1, ranks});
      for (uint64_t seed = 1; seed <= 60; ++seed) {
        SCOPED_TRACE(c10::str("seed ", seed, ", rank ", world.rank(), " of ", ranks));
        Draw draw(seed);
        const auto dtype = draw.of<at::ScalarType>({at::kDouble, at::kFloat, at::kBFloat16, at::kHalf});
        Buckets buckets(draw, dtype, world.rank(), ranks);
        const double wanted = buckets.norm();
        for (const NormOrder order : {NormOrder::any, NormOrder::exact}) {
          const at::Tensor norm = gradient_norm(buckets.all, true, groups.shard, order, {});
          const bool wide = dtype == at::kDouble;
          EXPECT_NEAR(norm.item<double>(), wanted, (wide ? 1e-12 : 1e-6) * wanted);
          EXPECT_NEAR(shown_norm(buckets.all, true, groups.shard, order, {}).item<double>(), wanted, 1e-6 * wanted);
        }
        EXPECT_EQ(first_unreduced(buckets.all, true), nullptr);
        EXPECT_TRUE(gradients_are_finite(buckets.all, true, groups.shard, {}));
        EXPECT_THAT(finite_sinks(buckets.all, buckets.sinks.size()), testing::Each(1));
        // One element of one parameter, on the rank that keeps it.
        const int64_t which = draw.whole(0, static_cast<int64_t>(buckets.sinks.size()) - 1);
        at::Tensor& hurt = buckets.whole[which];
        if (!hurt.defined() || hurt.numel() == 0) continue;
        const int64_t at = draw.whole(0, hurt.numel() - 1);
        hurt[at] = draw.of<double>({NAN, INFINITY, -INFINITY});
        buckets.fill();
        EXPECT_FALSE(gradients_are_finite(buckets.all, true, groups.shard, {}));
        const Sink& sink = buckets.sinks[which];
        const Range kept = buckets.all[sink.slot.bucket].kept;
        const bool here = sink.slot.offset + at >= kept.begin && sink.slot.offset + at < kept.end;
        const auto finite = finite_sinks(buckets.all, buckets.sinks.size());
        for (size_t i = 0; i < finite.size(); ++i) {
          EXPECT_EQ(finite[i], here && i == static_cast<size_t>(which) ? 0 : 1) << i;
        }
        for (const NormOrder order : {NormOrder::any, NormOrder::exact}) {
          EXPECT_FALSE(std::isfinite(gradient_norm(buckets.all, true, groups.shard, order, {}).item<double>()));
        }
      }
    });
  }
}

// More than one chunk of squares, and whoever keeps which of them: the same bits.
TEST(ShardedNorm, InTheExactOrderHasTheSameBitsHoweverItIsCut) {
  const int64_t size = (kAlignment << 16) * 2 + 3 * 5 * 7 * 8 * kAlignment;
  const at::Tensor values = noise({size}, 3).to(at::kFloat);
  const double wanted = values.to(at::kDouble).square().sum().sqrt().item<double>();
  float first = 0;
  for (const int ranks : {1, 2, 3, 4}) {
    run_local(ranks, [&](World world) {
      Groups groups = new_groups(world, {1, ranks});
      std::deque<Sink> sinks(1);
      std::deque<Bucket> buckets(1);
      const int64_t unit = ranks * kAlignment;
      Bucket& bucket = buckets[0];
      bucket.numel = (size + unit - 1) / unit * unit;
      bucket.kept = owned(bucket.numel, world.rank(), ranks);
      sinks[0].parameter = at::zeros({size}).requires_grad_();
      sinks[0].slot = {0, 0};
      bucket.sinks = {&sinks[0]};
      bucket.gradient = at::zeros({bucket.kept.size()});
      const Range mine = overlap(sinks[0].slot, size, bucket.kept);
      bucket.gradient.narrow(0, 0, mine.size()).copy_(values.narrow(0, mine.begin, mine.size()));
      sinks[0].grad() = bucket.gradient.narrow(0, 0, mine.size());
      const auto found = gradient_norm(buckets, true, groups.shard, NormOrder::exact, {}).item<float>();
      EXPECT_NEAR(found, wanted, 1e-6 * wanted) << ranks;
      if (ranks == 1) first = found;
      EXPECT_EQ(found, first) << ranks;
    });
  }
}

// Rows are cut anywhere between elements: clipped shares have the same bits on every number of ranks all the same.
TEST(ShardedNorm, OfRowsHasTheSameBitsOnEveryNumberOfRanks) {
  constexpr int kShares = 4;
  std::vector<at::Tensor> first;
  for (const std::string strategy : {"ddp", "zero3", "hsdp"}) {
    for (const int ranks : {1, 2, 4}) {
      run_local(ranks, [&](World world) {
        Parts model(3);
        Options options{.strategy = strategy, .clip_norm = 0.5, .deterministic = true, .virtual_ranks = kShares};
        options.cut = Cut::at_rows;
        Engine engine(world, model, SGD{.lr = 1}, options);
        std::vector<at::Tensor> found;
        for (int step = 0; step < 2; ++step) {
          const int mine = kShares / ranks;
          for (int share = world.rank() * mine; share < (world.rank() + 1) * mine; ++share) {
            std::vector<at::Tensor> gradients;
            for (const at::Tensor& one : ones(1)) gradients.push_back(noise(one.sizes(), 90 + share) / kShares);
            engine.backward(model.loss(gradients) * ranks);
          }
          found.push_back(engine.step().grad_norm);
          engine.zero_grad();
        }
        for (const at::Tensor& one : model.parameters()) found.push_back(engine.full_parameter(one));
        if (world.rank() != 0) return;
        if (first.empty()) first = found;
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_TRUE(found[i].equal(first[i])) << strategy << ranks << ' ' << i;
      });
    }
  }
  EXPECT_GT(first[0].item<double>(), 0.5) << "nothing is clipped";
}

// A .grad before the first backward, when there are no buckets of gradients yet; a sparse one, and one of another shape.
TEST(ShownNorm, CountsGradientsThatNoBackwardBrought) {
  run_local(2, [](World world) {
    at::Tensor a = at::zeros({5, 3}).requires_grad_(), b = at::zeros({4}).requires_grad_(),
               c = at::zeros({7}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}, {"c", c}}, {}, NoOptimizer{});
    EXPECT_EQ(engine.grad_norm().item<double>(), 0);
    a.mutable_grad() = at::full({5, 3}, 2.0).to_sparse();
    EXPECT_NEAR(engine.grad_norm().item<double>(), std::sqrt(15 * 4.0), 1e-5);
    b.mutable_grad() = at::arange(4, at::kFloat);
    EXPECT_NEAR(engine.grad_norm().item<double>(), std::sqrt(15 * 4.0 + 14), 1e-5);
    EXPECT_TRUE(b.grad().equal(at::arange(4, at::kFloat))) << "asking changes nothing";
    a.mutable_grad().reset();
    (c.sum() * 3).backward();
    EXPECT_NEAR(engine.grad_norm().item<double>(), std::sqrt(7 * 9.0 + 14), 1e-5);
    a.mutable_grad() = at::ones({3, 5});  // no gradient of such a parameter
    EXPECT_THAT([&] { engine.grad_norm(); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("'a' has another shape than the parameter")));
    a.mutable_grad() = at::arange(15, at::kFloat).view({3, 5}).t();  // the same shape, lying otherwise
    EXPECT_NEAR(engine.grad_norm().item<double>(), std::sqrt(7 * 9.0 + 14 + 1015), 1e-4);
  });
}

}  // namespace
}  // namespace plumb

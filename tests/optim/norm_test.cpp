// Runs over a bucket, norms, clipping and scaling over them: against one element after the other.
#include "optim/norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "optim/runs.h"

namespace plumb {
namespace {

using namespace test;

// A bucket made by hand: slots with padding between them, some with a gradient, of which one rank keeps a range.
struct Made {
  std::deque<Sink> sinks;
  std::deque<Bucket> buckets;
  std::vector<bool> active;
  std::vector<int> kind;  // runs join only sinks of one kind

  explicit Made(Draw& draw, at::ScalarType dtype = at::kDouble) {
    Bucket& bucket = buckets.emplace_back();
    bucket.index = 0;
    bucket.dtype = dtype;
    const int64_t count = draw.whole(1, 6);
    int64_t offset = 0;
    for (int64_t i = 0; i < count; ++i) {
      Sink& sink = sinks.emplace_back();
      sink.index = static_cast<int>(i);
      sink.parameter = noise({draw.whole(0, 3) == 0 ? draw.whole(0, 5) : draw.whole(1, 70)}, draw.whole(0, 1 << 20))
                           .to(dtype)
                           .requires_grad_();
      sink.slot = {0, offset};
      offset += (sink.parameter.numel() + kAlignment - 1) / kAlignment * kAlignment;
      bucket.sinks.push_back(&sink);
      active.push_back(!draw.one_in(3));
      kind.push_back(static_cast<int>(draw.whole(0, 1)));
    }
    offset = (offset + 4 * kAlignment - 1) / (4 * kAlignment) * (4 * kAlignment);
    if (offset == 0) offset = 4 * kAlignment;
    bucket.numel = offset;
    const int64_t parts = draw.of<int64_t>({1, 2, 4});
    bucket.kept = owned(offset, static_cast<int>(draw.whole(0, parts - 1)), static_cast<int>(parts));
    bucket.updated = bucket.held = bucket.kept;
    bucket.gradient = at::zeros({bucket.kept.size()}, dtype);
    for (Sink& sink : sinks) {
      const Range mine = overlap(sink.slot, sink.parameter.numel(), bucket.kept);
      const int64_t begin = std::clamp<int64_t>(mine.begin - bucket.kept.begin, 0, bucket.kept.size());
      sink.view = bucket.gradient.narrow(0, begin, mine.size());
      at::NoGradGuard no_grad;
      // Where there is no gradient, old values lie around.
      sink.view.copy_(noise({mine.size()}, draw.whole(0, 1 << 20)));
      if (active[sink.index]) sink.grad() = sink.view;
    }
  }
};

TEST(Runs, CoverWhatHasAGradientAndJoinNeighboursOfOneKind) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    const Made made(draw);
    const Bucket& bucket = made.buckets[0];
    const auto runs = runs_of(bucket, bucket.kept,
                              [&](const Sink& a, const Sink& b) { return made.kind[a.index] == made.kind[b.index]; });
    // Element by element: who lies there, with the padding behind.
    std::vector<int> owner(bucket.numel, -1), found(bucket.numel, -1);
    for (size_t i = 0; i < bucket.sinks.size(); ++i) {
      const int64_t end = i + 1 < bucket.sinks.size() ? bucket.sinks[i + 1]->slot.offset : bucket.numel;
      for (int64_t e = bucket.sinks[i]->slot.offset; e < end; ++e) {
        if (e >= bucket.kept.begin && e < bucket.kept.end && made.active[i]) owner[e] = static_cast<int>(i);
      }
    }
    int64_t last = bucket.kept.begin;
    for (const auto& run : runs) {
      ASSERT_LE(last, run.begin);
      ASSERT_LT(run.begin, run.end);
      ASSERT_LE(run.end, bucket.kept.end);
      last = run.end;
      EXPECT_EQ(owner[run.begin], run.first->index) << "the first one stands for the run";
      for (int64_t e = run.begin; e < run.end; ++e) {
        found[e] = owner[e];
        ASSERT_GE(owner[e], 0) << "without a gradient";
        EXPECT_EQ(made.kind[owner[e]], made.kind[run.first->index]);
      }
      const at::Tensor values = part(bucket.gradient, bucket.kept, run);
      EXPECT_EQ(values.numel(), run.end - run.begin);
      EXPECT_EQ(values.const_data_ptr(), bucket.gradient.narrow(0, run.begin - bucket.kept.begin, 1).const_data_ptr());
    }
    EXPECT_EQ(found, owner) << "left out";
    // As few as can be: no two neighbours of one kind without a gap.
    for (size_t r = 1; r < runs.size(); ++r) {
      if (runs[r].begin == runs[r - 1].end) {
        EXPECT_NE(made.kind[runs[r].first->index], made.kind[runs[r - 1].first->index]);
      }
    }
  }
}

TEST(Runs, SeeComplexNumbersAsTwoRealOnes) {
  const at::Tensor flat = at::arange(12, at::kDouble).to(at::kComplexDouble);
  const at::Tensor real = part(flat, {8, 20}, {10, 14, nullptr});
  EXPECT_TRUE(real.equal(at::tensor({2., 0., 3., 0., 4., 0., 5., 0.}, at::kDouble))) << real;
}

double plain_norm(const Made& made) {
  double squares = 0;
  for (const Sink& sink : made.sinks) {
    if (!made.active[sink.index]) continue;
    for (int64_t i = 0; i < sink.view.numel(); ++i) squares += std::pow(sink.view[i].item<double>(), 2);
  }
  return std::sqrt(squares);
}

TEST(Norm, IsThatOfWhatHasAGradientInEveryOrder) {
  Groups groups = new_groups(World(), {1, 1});
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    Made made(draw, draw.of<at::ScalarType>({at::kDouble, at::kFloat, at::kBFloat16}));
    const bool wide = made.buckets[0].dtype == at::kDouble;
    const double wanted = plain_norm(made);
    for (const NormOrder order : {NormOrder::any, NormOrder::exact}) {
      const at::Tensor norm = gradient_norm(made.buckets, false, groups.shard, order, {});
      EXPECT_NEAR(norm.item<double>(), wanted, (wide ? 1e-12 : 1e-6) * wanted);
      EXPECT_EQ(norm.scalar_type(), wide ? at::kDouble : at::kFloat);
      EXPECT_EQ(norm.dim(), 0);
    }
  }
}

// Long ones are cut into rows, with a rest.
TEST(Norm, OfManyElementsLosesNoDigits) {
  Groups groups = new_groups(World(), {1, 1});
  for (const int64_t size : {(1 << 14) - 16, 1 << 14, (1 << 15) - 16, 1 << 15, (1 << 15) + 16, 5 * (1 << 14) + 48}) {
    std::deque<Sink> sinks(1);
    std::deque<Bucket> buckets(1);
    sinks[0].parameter = at::zeros({size}).requires_grad_();
    sinks[0].slot = {0, 0};
    buckets[0].sinks = {&sinks[0]};
    buckets[0].numel = size;
    buckets[0].kept = {0, size};
    buckets[0].gradient = noise({size}, size).to(at::kFloat);
    sinks[0].view = buckets[0].gradient;
    sinks[0].grad() = buckets[0].gradient;
    const double wanted = buckets[0].gradient.to(at::kDouble).norm().item<double>();
    for (const NormOrder order : {NormOrder::any, NormOrder::exact}) {
      const double found = gradient_norm(buckets, false, groups.shard, order, {}).item<double>();
      EXPECT_NEAR(found, wanted, 1e-6 * wanted) << size;
    }
  }
}

TEST(Norm, ClippingBringsItToTheLimitAndLeavesSmallerOnesAlone) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    Made made(draw);
    const at::Tensor before = made.buckets[0].gradient.clone();
    const double norm = plain_norm(made);
    const double limit = norm * draw.of<double>({0.5, 0.999, 1.0, 1.001, 3.0}) + 1e-9;
    clip_gradients(made.buckets, at::scalar_tensor(norm, at::kDouble), limit);
    const double factor = std::min(1.0, limit / (norm + 1e-6));
    for (const Sink& sink : made.sinks) {
      const at::Tensor was = before.narrow(0, sink.view.storage_offset(), sink.view.numel());
      EXPECT_TRUE(sink.view.allclose(made.active[sink.index] ? was * factor : was, 1e-14, 0)) << sink.index;
      if (factor == 1.0) {
        EXPECT_TRUE(sink.view.equal(was)) << "not a bit changes below the limit";
      }
    }
  }
}

TEST(Norm, FindsOneElementThatIsNotFinite) {
  Groups groups = new_groups(World(), {1, 1});
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    Made made(draw, draw.of<at::ScalarType>({at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}));
    EXPECT_TRUE(gradients_are_finite(made.buckets, false, groups.shard, {}));
    const auto which = static_cast<size_t>(draw.whole(0, static_cast<int64_t>(made.sinks.size()) - 1));
    const at::Tensor view = made.sinks[which].view;
    if (view.numel() == 0) continue;
    view[draw.whole(0, view.numel() - 1)] = draw.of<double>({NAN, INFINITY, -INFINITY});
    EXPECT_EQ(gradients_are_finite(made.buckets, false, groups.shard, {}), !made.active[which])
        << "what no gradient stands for is nobody's";
    if (made.active[which]) {
      for (const NormOrder order : {NormOrder::any, NormOrder::exact}) {
        EXPECT_FALSE(std::isfinite(gradient_norm(made.buckets, false, groups.shard, order, {}).item<double>()));
      }
    }
  }
}

// engine.grad_norm(): of what .grad shows, on every rank, whoever owns which part.
class NormIn : public testing::TestWithParam<std::string> {};

TEST_P(NormIn, IsTheSameOnEveryRankAndCountsWhatTheUserDid) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](World world) {
      for (const bool deterministic : {false, true}) {
        if (deterministic && ranks == 3) continue;
        Parts model(9);
        Options options;
        options.strategy = GetParam();
        options.bucket_bytes = options.first_bucket_bytes = 300;
        options.deterministic = deterministic;
        options.virtual_ranks = ranks;
        Engine engine(world, model, NoOptimizer{}, options);
        EXPECT_EQ(engine.grad_norm().item<double>(), 0);
        const auto parameters = model.parameters();
        std::vector<at::Tensor> gradients, sums;
        for (size_t i = 0; i < parameters.size(); ++i) {
          // Only some have one, and some only on one rank.
          at::Tensor sum;
          at::Tensor mine;
          for (int rank = 0; rank < ranks; ++rank) {
            if (i % 4 == 2 || (i % 4 == 3 && rank > 0)) continue;
            const at::Tensor one = noise(Parts(9).parameters()[i].sizes(), 10 * i + rank);
            if (rank == world.rank()) mine = one;
            sum = sum.defined() ? sum + one / ranks : one / ranks;
          }
          gradients.push_back(mine);
          sums.push_back(sum);
        }
        const auto norm = [&] {
          double squares = 0;
          for (const at::Tensor& sum : sums) squares += sum.defined() ? sum.square().sum().item<double>() : 0;
          return std::sqrt(squares);
        };
        engine.backward(model.loss(gradients));
        if (deterministic) {
          EXPECT_THROW(engine.grad_norm(), Error);
          engine.step();
        }
        constexpr double tolerance = 1e-12;
        EXPECT_NEAR(engine.grad_norm().item<double>(), norm(), tolerance * norm());
        // In place, replaced, cleared.
        parameters[0].mutable_grad().mul_(3);
        sums[0] = sums[0] * 3;
        EXPECT_NEAR(engine.grad_norm().item<double>(), norm(), tolerance * norm());
        parameters[4].mutable_grad() = parameters[4].grad().clone() * 2;
        sums[4] = sums[4] * 2;
        EXPECT_NEAR(engine.grad_norm().item<double>(), norm(), tolerance * norm());
        parameters[5].mutable_grad().reset();
        sums[5].reset();
        EXPECT_NEAR(engine.grad_norm().item<double>(), norm(), tolerance * norm());
        engine.zero_grad();
        EXPECT_EQ(engine.grad_norm().item<double>(), 0);
      }
    });
  }
}

TEST_P(NormIn, IsRefusedWhereGradientsWaitForTheirReduction) {
  const bool pieces = GetParam() == "zero2" || GetParam() == "zero3";
  const auto held = errors(2, [&](World world) {
    Parts model(9);
    Options options;
    options.strategy = GetParam();
    options.hold_unsharded = true;
    Engine engine(world, model, NoOptimizer{}, options);
    const NoSync quiet(engine);
    engine.backward(model.loss(std::vector<at::Tensor>(Parts::kCount, at::ones({}, at::kDouble))));
    engine.grad_norm();
  });
  EXPECT_THAT(held, testing::Each(testing::HasSubstr("no_sync")));
  if (!pieces) return;
  const auto whole = errors(2, [&](World world) {
    at::Tensor weight = at::ones({40}).requires_grad_();
    Engine engine(world, NamedTensors{{"w", weight}}, {}, NoOptimizer{}, {.strategy = GetParam()});
    if (world.rank() == 1) weight.mutable_grad() = at::ones({40});
    engine.grad_norm();
  });
  EXPECT_THAT(whole, testing::Each(testing::AllOf(testing::HasSubstr("'w' on rank 1"), testing::HasSubstr("whole"))));
  // Also one that a rank's part holds all of, so that its length tells nothing.
  const auto small = errors(2, [&](World world) {
    at::Tensor first = at::ones({3}).requires_grad_(), second = at::ones({90}).requires_grad_();
    Engine engine(world, NamedTensors{{"second", second}, {"first", first}}, {}, NoOptimizer{},
                  {.strategy = GetParam()});
    (first.sum() + second.sum()).backward();
    if (world.rank() == 0) first.mutable_grad() = at::ones({3});
    engine.grad_norm();
  });
  EXPECT_THAT(small,
              testing::Each(testing::AllOf(testing::HasSubstr("'first' on rank 0"), testing::HasSubstr("whole"))));
}

// One gradient of several in a bucket is replaced by a computed one, in the middle of it.
TEST_P(NormIn, CountsAReplacedGradientAndItsNeighbours) {
  run_local(2, [&](World world) {
    std::vector<at::Tensor> parameters;
    NamedTensors named;
    at::Tensor loss = at::zeros({});
    double squares = 0;
    for (int i = 0; i < 5; ++i) {
      parameters.push_back(at::zeros({7 + i}).requires_grad_());
      named.emplace_back("p" + std::to_string(i), parameters.back());
      loss = loss + parameters.back().sum() * (i + 1);
      squares += (7 + i) * std::pow((i == 2 ? -2.0 : 1.0) * (i + 1), 2);
    }
    Engine engine(world, named, {}, NoOptimizer{}, {.strategy = GetParam()});
    loss.backward();
    parameters[2].mutable_grad() = parameters[2].grad() * -2;
    EXPECT_NEAR(engine.grad_norm().item<double>(), std::sqrt(squares), 1e-4);
  });
}

// Clipping reaches a gradient that keeps a tensor of its own, beside the engine's memory.
TEST(Clipping, IsSeenInAGradientThatHasAGraph) {
  run_local(2, [](World world) {
    at::Tensor weight = at::ones({4}).requires_grad_();
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, {.clip_norm = 0.5});
    weight.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    const at::Tensor kept = weight.grad();
    engine.step();
    EXPECT_TRUE(kept.requires_grad());
    EXPECT_TRUE(at::allclose(kept.detach(), at::full({4}, 0.25), 1e-4)) << kept;
    EXPECT_TRUE(at::allclose(weight.detach(), at::full({4}, 0.75), 1e-4)) << weight;
    weight.mutable_grad().reset();  // its graph holds the weight
  });
}

// Of a model in two dtypes, whichever comes first: a norm that was rounded to the narrower one would clip the others by it.
TEST_P(NormIn, IsAsPreciseAsTheWidestGradient) {
  constexpr double little = 0x1p-24;  // no digit of the norm is the narrow one's
  for (const at::ScalarType dtype : {at::kDouble, at::kComplexDouble}) {
    for (const bool deterministic : {false, true}) {
      for (const bool wide_first : {false, true}) {
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(dtype, deterministic ? ", deterministic" : "", wide_first ? ", wide first" : ""));
          const at::Tensor narrow = at::zeros({30}).requires_grad_(), wide = at::zeros({30}, dtype).requires_grad_();
          NamedTensors named{{"narrow", narrow}, {"wide", wide}};
          if (wide_first) std::swap(named[0], named[1]);
          Engine engine(world, named, {}, SGD{.lr = 1},
                        {.strategy = GetParam(), .clip_norm = 1.0, .deterministic = deterministic, .virtual_ranks = 2});
          const double norm = 1.1 * std::sqrt(30.0);
          for (int step = 1; step <= 2; ++step) {
            (little * narrow.sum() + 1.1 * at::real(wide).sum()).backward();
            if (!deterministic) {
              EXPECT_NEAR(engine.grad_norm().item<double>(), norm, 1e-12);
            }
            EXPECT_NEAR(engine.step().grad_norm.item<double>(), norm, 1e-12);
            engine.zero_grad();
            const at::Tensor found = at::real(engine.full_parameter(wide));
            EXPECT_LT(distance(found, at::full_like(found, -step * 1.1 / (norm + 1e-6))), 1e-12);
          }
        });
      }
    }
  }
}

// As torch's clip_grad_norm_: beside what is infinite, what is finite becomes nothing; beside what is no number, none. So, too, where
// each gradient is finite, and f32 cannot hold their norm.
TEST_P(NormIn, ThatIsNotFiniteClipsAsTorchDoes) {
  for (const auto& [bad, deterministic] :
       {std::pair{INFINITY, false}, {NAN, false}, {1.5e38F, false}, {INFINITY, true}, {NAN, true}, {1.5e38F, true}}) {
    at::Tensor factors = at::full({30}, 3.0);
    factors.slice(0, 7, 17).fill_(bad);  // of which two ranks' are summed
    if (std::isnan(bad)) factors[18] = INFINITY;
    const auto loss = [&](const std::vector<at::Tensor>& all) { return 2 * all[0].sum() + (all[1] * factors).sum(); };
    const auto make = [] {
      return std::vector<at::Tensor>{at::zeros({30}).requires_grad_(), at::zeros({30}).requires_grad_()};
    };
    const std::vector<at::Tensor> theirs = make();
    loss(theirs).backward();
    torch::nn::utils::clip_grad_norm_(theirs, 1.0);
    run_local(2, [&, bad = bad, deterministic = deterministic](World world) {
      SCOPED_TRACE(c10::str(bad, deterministic ? ", deterministic" : ""));
      const std::vector<at::Tensor> ours = make();
      Engine engine(world, NamedTensors{{"a", ours[0]}, {"b", ours[1]}}, {}, SGD{.lr = 1},
                    {.strategy = GetParam(), .clip_norm = 1.0, .deterministic = deterministic, .virtual_ranks = 2});
      loss(ours).backward();
      EXPECT_FALSE(std::isfinite(engine.step().grad_norm.item<double>()));
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor found = engine.full_parameter(ours[i]);
        EXPECT_TRUE(at::allclose(found, -theirs[i].grad(), 1e-6, 1e-6, /*equal_nan=*/true)) << found;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, NormIn, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb

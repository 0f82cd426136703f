// Gradients and parameters in the user's own hands: what is set, replaced, kept, frozen or given other memory counts as in one
// process, and what cannot count is an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "errors.h"
#include "grad/support/leaf.h"
#include "plumb/fused.h"
#include "plumb/plumb.h"
#include "watch/wire.h"

namespace plumb {
namespace {

using test::errors;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::ThrowsMessage;

using test::leaf;

class AssignedIn : public testing::TestWithParam<std::string> {};

TEST_P(AssignedIn, GradientsOfAnotherShapeDtypeOrDeviceAreRefused) {
  const std::vector<std::pair<at::Tensor, std::string>> wrong = {{at::ones({4, 2}), "shape [4, 2]"},
                                                                 {at::ones({8}, at::kDouble), "would be rounded"},
                                                                 {at::ones({8}, at::kMeta), "meta"}};
  for (const auto& [gradient, word] : wrong) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf({8}), b = leaf({8});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
      b.sum().backward();
      engine.step();
      a.mutable_grad() = gradient.clone();
      engine.step();
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("'a'"), HasSubstr(word))));
  }
}

// Parameters of two dtypes lie in buckets of their own, and whole gradients of one never in memory of the other.
TEST_P(AssignedIn, DtypesAreNotMixed) {
  run_local(3, [&](World world) {
    std::vector<at::Tensor> parameters;
    NamedTensors named;
    for (int i = 0; i < 6; ++i) {
      parameters.push_back(leaf({30 + 7 * i}, i % 2 == 0 ? at::kFloat : at::kDouble));
      named.emplace_back("p" + std::to_string(i), parameters.back());
    }
    Engine engine(world, named, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .bucket_bytes = 200, .first_bucket_bytes = 200});
    for (int step = 1; step <= 3; ++step) {
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor each =
            at::arange(parameters[i].numel(), at::kDouble).mul(world.rank() + static_cast<double>(i));
        loss = loss + (parameters[i].to(at::kDouble) * each).sum();
      }
      loss.backward();
      engine.step();
      engine.zero_grad();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor wanted =
            at::arange(parameters[i].numel(), at::kDouble).mul((1.0 + static_cast<double>(i)) * -step);
        EXPECT_TRUE(at::allclose(engine.full_parameter(parameters[i]).to(at::kDouble), wanted, 1e-5)) << i;
      }
    }
  });
}

// A third of one, in f32 and not in the bf16 that came.
TEST_P(AssignedIn, ANarrowGradientIsScaledInTheWidthOfTheSum) {
  run_local(3, [&](World world) {
    at::Tensor a = leaf({40}, at::kBFloat16);
    Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{},
                  {.strategy = GetParam(), .accumulate_dtype = at::kFloat});
    for (const bool delivered : {false, true}) {
      const at::Tensor ones = at::full({40}, world.rank() == 0 ? 1.0 : 0.0, at::kBFloat16);
      if (delivered) {
        engine.deliver(a, ones);
        engine.end_pass();
      } else {
        (a * ones).sum().backward();
      }
      EXPECT_TRUE(at::allclose(engine.full_gradient(a).to(at::kFloat), at::full({40}, 1.0F / 3), 1e-6)) << delivered;
      engine.zero_grad();
    }
  });
}

// A third is exact in no dtype: whoever divides in another width than the gradient's own is found out.
TEST_P(AssignedIn, AMeanIsAsPreciseAsItsDtype) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kComplexDouble}) {
    run_local(3, [&](World world) {
      at::Tensor a = leaf({40}, dtype), b = leaf({3}, dtype);
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, NoOptimizer{}, {.strategy = GetParam()});
      const at::Tensor mine = at::arange(1, 41).to(dtype) * (world.rank() == 0 ? 1.0 : 0.0);
      const at::Tensor third = at::arange(1, 41).to(dtype) / 3;
      const double most = dtype == at::kFloat ? 3e-7 : 1e-15;
      for (const char* how : {"backward", "delivered", "assigned", "twice"}) {
        const bool twice = how == std::string("twice");
        if (how == std::string("delivered")) {
          engine.deliver(a, mine);
          engine.end_pass();
        } else if (how == std::string("assigned")) {
          at::real((b * at::ones_like(b)).sum()).backward();
          a.mutable_grad() = mine.clone();
          engine.step();
        } else {
          for (int i = 0; i < (twice ? 2 : 1); ++i) at::real((a * mine).sum()).backward();
        }
        const at::Tensor found = engine.full_gradient(a) / (twice ? 2 : 1);
        EXPECT_LE(((found - third) / third).abs().max().item<double>(), most) << dtype << ", " << how;
        engine.zero_grad();
      }
    });
  }
}

TEST_P(AssignedIn, ADeliveredGradientsMemoryIsTheCallersAgain) {
  run_local(2, [&](World world) {
    at::Tensor a = leaf({40}), b = leaf({3});
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, NoOptimizer{}, {.strategy = GetParam()});
    for (int round = 0; round < 2; ++round) {
      at::Tensor memory = at::full({40}, 2.0 + world.rank());
      engine.deliver(a, memory);
      memory.fill_(1000);
      engine.deliver(b, at::ones({3}));
      engine.end_pass();
      EXPECT_TRUE(engine.full_gradient(a).eq(2.5).all().item<bool>()) << round;
      engine.zero_grad();
    }
  });
}

// Held back and then reduced: they are the mean, and may be asked about.
TEST_P(AssignedIn, GradientsThatWereHeldAreReducedWithTheNextAndNoLongerHeld) {
  run_local(2, [&](World world) {
    at::Tensor a = leaf({8});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}, {.strategy = GetParam(), .hold_unsharded = true});
    for (int step = 1; step <= 2; ++step) {
      {
        const NoSync quiet(engine);
        (a * (world.rank() + 1)).sum().backward();
        EXPECT_THAT([&] { engine.full_gradient(a); }, ThrowsMessage<Error>(HasSubstr("no_sync")));
      }
      a.sum().backward();
      EXPECT_NEAR(engine.grad_norm().item<double>(), 2.5 * std::sqrt(8.0), 1e-5);
      EXPECT_TRUE(engine.full_gradient(a).eq(2.5).all().item<bool>());
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-2.5 * step).all().item<bool>());
    }
  });
}

// What other backwards hold is no reason to leave a reduced gradient unanswered.
TEST_P(AssignedIn, ReducedGradientsAreAnsweredWhileOthersAreHeld) {
  run_local(2, [&](World world) {
    at::Tensor a = leaf({8}), b = leaf({9});
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .hold_unsharded = true});
    (a.sum() + b.sum()).backward();
    {
      const NoSync quiet(engine);
      (a * (world.rank() + 1)).sum().backward();
      EXPECT_NEAR(b.grad().norm().item<double>(), 3.0, 1e-6);
    }
    EXPECT_NEAR(b.grad().norm().item<double>(), 3.0, 1e-6);
    engine.step();
    EXPECT_TRUE(engine.full_parameter(a).eq(-2.5).all().item<bool>());
    EXPECT_TRUE(engine.full_parameter(b).eq(-1).all().item<bool>());
  });
}

// Frozen after the engine was built: after the next step it costs nothing on the wire, and thawed it is trained as before.
TEST_P(AssignedIn, AFrozenParameterTravelsNoMoreAndIsTrainedAgainWhenItIsThawed) {
  run_local(2, [&](World world) {
    at::Tensor a = leaf({64}), b = leaf({4096});
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .bucket_bytes = 512, .first_bucket_bytes = 512});
    const auto bytes = [&] { return wire_counts(world)[static_cast<size_t>(Cargo::data)].bytes; };
    std::vector<int64_t> sent;
    double wanted = 0;
    for (int step = 0; step < 8; ++step) {
      const bool trained = step < 2 || step == 5 || step == 7;
      b.set_requires_grad(trained);
      const int64_t before = bytes();
      (a.sum() + b.sum() * (world.rank() + 1)).backward();
      engine.step();
      engine.zero_grad();
      sent.push_back(bytes() - before);
      if (trained) wanted -= 1.5;
      EXPECT_TRUE(engine.full_parameter(b).eq(wanted).all().item<bool>()) << "step " << step;
      EXPECT_TRUE(engine.full_parameter(a).eq(-1.0 - step).all().item<bool>()) << "step " << step;
    }
    EXPECT_GT(sent[1], 4096 * 4);
    for (const int frozen : {3, 4}) EXPECT_LT(sent[frozen], 2048) << "step " << frozen;
    EXPECT_EQ(sent[5], sent[1]);
    EXPECT_EQ(sent[7], sent[1]);
  });
}

// The bucket becomes wider than the rule of this leaf: whatever .grad holds keeps its dtype, though it was there before, or others
// brought all of it.
TEST_P(AssignedIn, AGradientKeepsItsDtypeWhateverANeighbourAsksFor) {
  if (GetParam() == "zero2") GTEST_SKIP() << "a piece is of its bucket's dtype";
  run_local(3, [&](World world) {
    const at::Tensor a = leaf({8}, at::kBFloat16), b = leaf({8}, at::kBFloat16);
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    const auto is = [&](const at::Tensor& leaf, at::ScalarType dtype, double value) {
      EXPECT_EQ(leaf.grad().scalar_type(), dtype) << "rank " << world.rank();
      EXPECT_TRUE(leaf.grad().eq(value).all().item<bool>()) << leaf.grad();
    };
    (a.sum() + b.sum()).backward();
    b.mutable_grad().reset();
    b.set_grad_dtype(at::kFloat);
    b.sum().backward();
    is(a, at::kBFloat16, 1);
    is(b, at::kFloat, 1);
    a.sum().backward();
    is(a, at::kBFloat16, 2);
    engine.zero_grad();
    (world.rank() == 0 ? 3 * a.sum() + b.sum() : b.sum()).backward();
    is(a, at::kBFloat16, 1);
    (a.sum() + b.sum()).backward();
    is(a, at::kBFloat16, 2);
    is(b, at::kFloat, 2);
    engine.step();
    EXPECT_TRUE(engine.full_parameter(a).eq(-2).all().item<bool>());
  });
}

// As an optimizer does that finds a gradient: whether the parameter may have one is the backward's business.
TEST_P(AssignedIn, AGradientOfAFrozenParameterIsTheMeanOfWhatWasAssigned) {
  run_local(2, [&](World world) {
    at::Tensor a = leaf({40}), b = leaf({40}), c = at::zeros({40});
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}, {"c", c}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .bucket_bytes = 64, .first_bucket_bytes = 64});
    for (int step = 1; step <= 3; ++step) {
      if (step == 2) b.set_requires_grad(false);
      (a.sum() + b.sum()).backward();
      if (step > 1) b.mutable_grad() = at::full({40}, 2.0 * world.rank());
      if (step == 3) c.mutable_grad() = at::full({40}, 4.0 * world.rank());
      engine.step();
      engine.zero_grad();
      EXPECT_FALSE(b.grad().defined());
      EXPECT_TRUE(engine.full_parameter(a).eq(-step).all().item<bool>());
      EXPECT_TRUE(engine.full_parameter(b).eq(-step).all().item<bool>()) << engine.full_parameter(b);
      EXPECT_TRUE(engine.full_parameter(c).eq(step == 3 ? -2 : 0).all().item<bool>()) << engine.full_parameter(c);
    }
  });
}

// What autograd knows of a gradient ends with it: the next one is another tensor, as in one process.
TEST_P(AssignedIn, AGradientThatWasMadeToRequireOneIsGoneWhenItIsCleared) {
  run_local(2, [&](World world) {
    at::Tensor p = leaf({8});
    Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    const auto run = [&](bool requires_grad) {
      (2 * p).sum().backward();
      EXPECT_EQ(p.grad().requires_grad(), requires_grad);
    };
    run(false);
    p.grad().set_requires_grad(true);
    run(true);  // it is added to, and stays what it is
    engine.step();
    engine.zero_grad();
    run(false);
    p.mutable_grad().mul_(0.5);
    p.grad().set_requires_grad(true);
    const at::Tensor kept = p.grad();
    engine.zero_grad();
    run(false);
    EXPECT_TRUE(kept.requires_grad());
    EXPECT_TRUE(kept.eq(1).all().item<bool>());
    engine.step();
    EXPECT_TRUE(engine.full_parameter(p).eq(-6).all().item<bool>()) << engine.full_parameter(p);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, AssignedIn, testing::Values("ddp", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

// Few elements are copied without ATen, and by the same rules.
TEST(SmallGradients, ObeyTheLeafsRuleBesideANeighbourThatAsksForMore) {
  const auto texts = errors(2, [](World world) {
    const at::Tensor a = leaf({8}, at::kBFloat16), b = leaf({8}, at::kBFloat16);
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1});
    const auto step = [&] {
      (a.sum() + b.sum()).backward();
      engine.step();
      engine.zero_grad();
    };
    step();
    b.set_grad_dtype(at::kFloat);  // the bucket is f32 from here on
    step();
    b.sum().backward();
    a.mutable_grad() = at::ones({8});
    engine.step();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("'a'"), HasSubstr("would be rounded"))));
}

TEST(SmallGradients, AreTheSameBitsAsLargeOnesWhateverTheirStrides) {
  for (const char* strategy : {"ddp", "zero2"}) {
    run_local(3, [&](World world) {
      // The same numbers in a small parameter and as the beginning of a large one; one lies the other way round.
      const at::Tensor small = leaf({6, 8}), turned = leaf({8, 6}).detach().t().requires_grad_(),
                       large = leaf({900, 8});
      Engine engine(world, NamedTensors{{"small", small}, {"turned", turned}, {"large", large}}, {}, SGD{.lr = 1},
                    {.strategy = strategy});
      const at::Tensor factors = (at::arange(900 * 8, at::kFloat) * (0.37 + world.rank())).sin().view({900, 8});
      const at::Tensor few = factors.narrow(0, 0, 6);
      ((small * few).sum() + (turned * few).sum() + (large * factors).sum()).backward();
      engine.step();
      const at::Tensor wanted = engine.full_parameter(large).narrow(0, 0, 6);
      EXPECT_TRUE(engine.full_parameter(small).equal(wanted)) << strategy;
      EXPECT_TRUE(engine.full_parameter(turned).equal(wanted)) << strategy;
    });
  }
}

TEST(Assigned, AParameterGivenOtherMemoryOnOneRankIsAnErrorThatNamesIt) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = leaf({8});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    for (int step = 0; step < 2; ++step) {
      a.sum().backward();
      engine.step();
      engine.zero_grad();
    }
    if (world.rank() == 1) a.set_data(at::ones({8}));
    a.sum().backward();
    engine.step();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("'a' was changed between steps"), HasSubstr("rank 1"))));
}

// p.grad.data = …, as many programs write it.
TEST(Assigned, AGradientWhoseTensorWasGivenOtherMemoryIsThatMemory) {
  for (const char* strategy : {"ddp", "zero1"}) {
    run_local(2, [&](World world) {
      at::Tensor a = leaf({4}), b = leaf({4});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = strategy});
      for (int step = 0; step < 2; ++step) {
        const at::Tensor before = a.detach().clone();
        (a + b).sum().backward();
        at::Tensor kept = a.grad();
        kept.set_data(at::full({4}, 3.0));
        EXPECT_NEAR(engine.grad_norm().item<double>(), std::sqrt(40.0), 1e-5) << strategy;
        EXPECT_TRUE(engine.full_gradient(a).eq(3).all().item<bool>());
        engine.step();
        EXPECT_TRUE(a.detach().allclose(before - 3)) << strategy << ", step " << step;
        engine.zero_grad();
      }
    });
  }
}

TEST(Assigned, AGradientThatWasResizedIsAnErrorThatNamesIt) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = leaf({8});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    a.sum().backward();
    a.mutable_grad().resize_({3});
    engine.step();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("'a' has shape [3]"), HasSubstr("expected [8]"))));
}

// Its own tensor, beside the engine's memory, is what the step takes.
TEST(Assigned, AGradientThatHasAGraphMayBeChangedBeforeTheStep) {
  run_local(2, [](World world) {
    at::Tensor a = at::ones({4}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    a.pow(2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    a.grad().detach().mul_(0.25);
    engine.step();
    EXPECT_TRUE(a.detach().eq(0.5).all().item<bool>()) << a;
    a.mutable_grad().reset();
  });
}

// Whatever a pass brings of it, also when its reduction is on its way.
TEST(Assigned, AGradientThatHasAGraphTakesAllThatAPassBrings) {
  for (const int times : {1, 2, 3}) {
    run_local(2, [&](World world) {
      at::Tensor a = leaf({4}), b = leaf({4});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                    {.bucket_bytes = 8, .first_bucket_bytes = 8});
      ((a + b).sum() * at::ones({}).requires_grad_()).backward({}, /*retain_graph=*/false, /*create_graph=*/true);
      {
        const Pass pass = engine.pass();
        for (int i = 0; i < times; ++i) ((a + b).sum() * (world.rank() + 1)).backward();
      }
      EXPECT_TRUE(a.grad().eq(1 + 1.5 * times).all().item<bool>()) << times << ": " << a.grad();
      EXPECT_TRUE(b.grad().eq(1 + 1.5 * times).all().item<bool>()) << times << ": " << b.grad();
      engine.step();
      EXPECT_TRUE(a.detach().eq(-1 - 1.5 * times).all().item<bool>());
      for (const at::Tensor& p : {a, b}) p.mutable_grad().reset();
    });
  }
}

// And before an operation adds to it, in the engine's memory, which has not seen the change.
TEST(Assigned, AGradientThatHasAGraphMayBeChangedBeforeAnOperationAddsToIt) {
  for (const bool inside : {false, true}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::ones({4}).requires_grad_(), b = leaf({4});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1});
      a.pow(2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      a.grad().detach().mul_(0.25);
      const auto write = [&] {
        const auto sink = sink_of(a);
        const GradTarget target = sink->open();
        EXPECT_TRUE(target.accumulate);
        target.buffer.add_(world.rank() + 1.0);
        sink->wrote();
      };
      if (inside) {
        const auto pass = engine.pass();
        b.sum().backward();
        write();
      } else {
        write();
      }
      engine.step();
      EXPECT_TRUE(a.detach().eq(1 - 0.5 - 1.5).all().item<bool>()) << a << (inside ? ", inside a pass" : "");
      a.mutable_grad().reset();
    });
  }
}

TEST(Assigned, WeightsOfBackwardsBelongToTheirStepAlone) {
  run_local(2, [](World world) {
    at::Tensor a = leaf({4});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}, {.nonfinite = NonFinite::skip});
    engine.backward(a.sum() * INFINITY, false, 1000.0);
    EXPECT_TRUE(engine.step().skipped);
    engine.zero_grad();
    engine.backward(a.sum() * 6, false, 1.0 + world.rank());  // 12 over 3 things
    engine.step();
    EXPECT_TRUE(a.detach().eq(-4).all().item<bool>()) << a;
    engine.zero_grad();
    engine.backward(a.sum(), false, 1.0);
    engine.backward(a.sum());
    EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<Error>(HasSubstr("to 1 of its 2 backwards")));
  });
}

// libtorch hands the sixtieth to a thread of its own.
TEST(Assigned, BackwardsNestedDeeperThanAThreadTakesAreOnePass) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor a = leaf({3});
      Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}, {.strategy = strategy});
      std::function<void(int)> nest = [&](int depth) {
        at::Tensor x = at::ones({3}).requires_grad_();
        at::Tensor y = x * 2;
        if (depth > 0) {
          y.register_hook([&, depth](const at::Tensor&) {
            const at::AutoGradMode on(true);
            nest(depth - 1);
          });
        }
        (y * a).sum().backward();
      };
      for (int step = 1; step <= 2; ++step) {
        nest(90);
        EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, 1) << strategy;
        engine.step();
        engine.zero_grad();
        const at::Tensor whole = engine.full_parameter(a);
        EXPECT_TRUE(whole.detach().eq(-2.0 * 91 * step).all().item<bool>()) << strategy << whole;
      }
    });
  }
}

}  // namespace
}  // namespace plumb

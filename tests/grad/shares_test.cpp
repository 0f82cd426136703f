// What becomes of a step's shares in deterministic mode: when a backward fails, a step comes too early or is refused, a leaf's rule
// changes, or a parameter begins to train.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "grad/support/leaf.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using test::leaf;
using testing::HasSubstr;
using testing::ThrowsMessage;

class SharesIn : public testing::TestWithParam<std::string> {};

// Of two shares a rank, one fails after it brought a gradient, on one rank or on both, once or again; with weights or without.
TEST_P(SharesIn, OfABackwardThatFailedWeighNothing) {
  for (const bool everywhere : {false, true}) {
    for (const int failing : {0, 1}) {
      for (const int times : {1, 2}) {
        for (const bool weighted : {false, true}) {
          run_local(2, [&](World world) {
            SCOPED_TRACE(c10::str(everywhere ? "everywhere" : "on rank 1", ", share ", failing, ", ", times, " times"));
            at::Tensor a = leaf({7}), b = leaf({3});
            Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                          {.strategy = GetParam(), .deterministic = true, .virtual_ranks = 4});
            const auto run = [&](int share, bool fails) {
              const at::Tensor later = b * 1;  // its gradient comes last
              if (fails)
                later.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
              const at::Tensor loss = later.sum() + a.sum() * (1 + share + 10 * world.rank());
              engine.backward(loss, false, weighted ? std::optional(1.0) : std::nullopt);
            };
            for (int step = 1; step <= 2; ++step) {
              for (int share = 0; share < 2; ++share) {
                for (int i = 0; i < times && share == failing && (everywhere || world.rank() == 1); ++i) {
                  EXPECT_THAT([&] { run(share, true); }, ThrowsMessage<std::exception>(HasSubstr("planned")));
                  EXPECT_EQ(a.grad().defined(), share == 1) << "as it was before";
                  if (share == 0) engine.zero_grad();
                }
                run(share, false);
              }
              engine.step();
              engine.zero_grad();
              const double parts = weighted ? 4.0 : 2.0;  // the mean over the things, or over the ranks
              EXPECT_TRUE(at::allclose(engine.full_parameter(a), at::full({7}, -step * (1 + 2 + 11 + 12) / parts)))
                  << engine.full_parameter(a);
              EXPECT_TRUE(at::allclose(engine.full_parameter(b), at::full({3}, -step * 4 / parts)));
            }
          });
        }
      }
    }
  }
}

// It has done nothing yet: the missing shares may be run, and the step called again.
TEST_P(SharesIn, AStepThatCameTooEarlyMayBeCalledAgain) {
  run_local(2, [&](World world) {
    at::Tensor a = leaf({7});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .deterministic = true, .virtual_ranks = 4});
    for (int step = 1; step <= 2; ++step) {
      (a.sum() * 1).backward();
      EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<Error>(HasSubstr("step() after 1 backwards")));
      (a.sum() * 2).backward();
      engine.step();
      engine.zero_grad();
      EXPECT_TRUE(engine.full_parameter(a).eq(-3.0 * step).all().item<bool>()) << engine.full_parameter(a);
    }
  });
}

// The wider rule asks for a sum that is not rounded: 2^-10 beside 1 is nothing in bf16.
TEST_P(SharesIn, AreAddedInTheWidestDtypeThatARuleHasAskedFor) {
  for (const int ranks : {1, 2}) {
    for (int widens = 0; widens < 4 / ranks; ++widens) {
      run_local(ranks, [&](World world) {
        SCOPED_TRACE(c10::str(ranks, " ranks, before share ", widens));
        at::Tensor a = leaf({9}, at::kBFloat16);
        Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{},
                      {.strategy = GetParam(), .deterministic = true, .virtual_ranks = 4});
        const int shares = 4 / ranks;
        double wanted = 0;
        for (int share = 0; share < shares; ++share) {
          if (share == widens) a.set_grad_dtype(at::kFloat);
          const double gradient = share == 0 ? 1.0 : share < widens ? 0.0 : 1.0 / 1024;
          (a.to(at::kFloat).sum() * gradient).backward();
          wanted += gradient;
        }
        engine.step();
        const at::Tensor found = engine.full_gradient(a);
        EXPECT_EQ(found.scalar_type(), at::kFloat);
        EXPECT_TRUE(found.eq(wanted).all().item<bool>()) << found[0].item<double>() << " instead of " << wanted;
      });
    }
  }
}

// Those of another try are counted, and weighed, anew; or what is there is mended, and the step called again.
TEST_P(SharesIn, OfAStepThatWasRefusedAreBehindIt) {
  for (const bool weighted : {false, true}) {
    for (const std::string then : {"cleared", "dropped", "mended"}) {
      run_local(2, [&](World world) {
        SCOPED_TRACE(c10::str(then, weighted ? ", weighted" : ""));
        at::Tensor a = leaf({7});
        Engine engine(
            world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1},
            {.strategy = GetParam(), .nonfinite = NonFinite::error, .deterministic = true, .virtual_ranks = 4});
        const auto run = [&](double gradient) {
          engine.backward(a.sum() * gradient, false, weighted ? std::optional(2.0) : std::nullopt);
        };
        for (int step = 1; step <= 2; ++step) {
          for (int share = 0; share < 2; ++share) run(world.rank() == 1 && share == 0 ? NAN : 1);
          EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<Error>(HasSubstr("is not finite")));
          if (then == "mended") {
            a.mutable_grad().nan_to_num_(5);
          } else {
            then == "cleared" ? engine.zero_grad() : a.mutable_grad().reset();
            run(1 + world.rank());
            run(3 + world.rank());
          }
          engine.step();
          engine.zero_grad();
          EXPECT_TRUE(engine.full_parameter(a).eq((weighted ? -1.25 : -5.0) * step).all().item<bool>())
              << engine.full_parameter(a);
        }
      });
    }
  }
}

// It has not begun: the step has as many shares as before.
TEST_P(SharesIn, OneThatIsRefusedAtItsBeginningIsNone) {
  for (const bool counted : {false, true}) {
    run_local(2, [&](World world) {
      at::Tensor a = leaf({7});
      Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1},
                    {.strategy = GetParam(), .deterministic = true, .virtual_ranks = 4});
      const auto run = [&](double gradient) {
        counted ? engine.backward(a.sum() * gradient) : (a.sum() * gradient).backward();
      };
      for (int step = 1; step <= 2; ++step) {
        run(100);
        a.mutable_grad().mul_(0.5);
        for (int i = 0; i < 2; ++i) {
          EXPECT_THAT([&] { run(10); }, ThrowsMessage<std::exception>(HasSubstr("was changed in place")));
        }
        engine.zero_grad();
        run(1 + world.rank());
        engine.step();
        engine.zero_grad();
        EXPECT_TRUE(engine.full_parameter(a).eq(-1.5 * step).all().item<bool>()) << engine.full_parameter(a);
      }
    });
  }
}

// What came before in the wider one is in the sum all the same.
TEST_P(SharesIn, OfALeafWhoseRuleHasNarrowedAreOneSum) {
  for (const int ranks : {1, 2}) {
    for (int narrows = 0; narrows < 4 / ranks; ++narrows) {
      run_local(ranks, [&](World world) {
        SCOPED_TRACE(c10::str(ranks, " ranks, before share ", narrows));
        at::Tensor a = leaf({9}, at::kBFloat16);
        a.set_grad_dtype(at::kFloat);
        Engine engine(world, NamedTensors{{"a", a}}, {}, NoOptimizer{},
                      {.strategy = GetParam(), .deterministic = true, .virtual_ranks = 4});
        for (int share = 0; share < 4 / ranks; ++share) {
          if (share == narrows) a.set_grad_dtype(at::kBFloat16);
          (a.to(at::kFloat).sum() * (share + 1)).backward();
        }
        engine.step();
        const at::Tensor found = engine.full_gradient(a);
        EXPECT_EQ(found.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(found.eq(ranks == 1 ? 10 : 3).all().item<bool>()) << found[0].item<double>();
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, SharesIn, testing::Values("ddp", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

// Frozen when the engine was built, it is summed share by share from the first on.
TEST(Shares, OfAParameterThatBeginsToTrainAreTheSameBitsOnEveryWorld) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const int thaws : {0, 2}) {  // after so many of a rank's shares
      at::Tensor first;
      for (const int ranks : {1, 2, 4}) {
        if (thaws > 0 && ranks > 1) continue;
        run_local(ranks, [&](World world) {
          at::Tensor a = at::zeros({100}).requires_grad_(), b = at::zeros({100});
          Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                        {.strategy = strategy, .deterministic = true, .virtual_ranks = 16});
          at::Tensor sum = at::zeros({100});
          for (int step = 0; step < 2; ++step) {
            for (int i = 0; i < 16 / ranks; ++i) {
              if (step == 1 && i == thaws) b.set_requires_grad(true);
              auto generator = at::detail::createCPUGenerator(100 * step + world.rank() * 16 / ranks + i);
              const at::Tensor of_a = at::randn({100}, generator), of_b = at::randn({100}, generator);
              if (b.requires_grad()) sum = sum + of_b;
              engine.backward(((a * of_a).sum() + (b * of_b).sum()) * engine.share_weight());
            }
            engine.step();
            engine.zero_grad();
          }
          const at::Tensor found = engine.full_parameter(b);
          if (ranks == 1) {
            EXPECT_TRUE(at::allclose(found, -sum / 16, 1e-4, 1e-5));
          }
          if (world.rank() == 0 && !first.defined()) first = found;
          EXPECT_TRUE(found.equal(first)) << strategy << " on " << ranks;
        });
      }
    }
  }
}

// Also where the one more of a rank's parameters begins another word of what ranks tell each other.
TEST(Shares, OfRanksThatBeginToTrainDifferentlyAreAnError) {
  for (const auto& one : {std::pair{false, 1}, {true, 1}, {false, 64}, {true, 64}}) {
    const bool later = one.first;  // or never
    const int trained = one.second;
    EXPECT_THAT(
        [&] {
          run_local(2, [&](World world) {
            NamedTensors named;
            for (int i = 0; i < trained; ++i)
              named.emplace_back("a" + std::to_string(i), at::zeros({8}).requires_grad_());
            at::Tensor b = at::zeros({8}), c = at::zeros({8});
            named.emplace_back("b", b);
            named.emplace_back("c", c);
            Engine engine(world, named, {}, SGD{.lr = 1}, {.deterministic = true, .virtual_ranks = 4});
            for (int i = 0; i < 2; ++i) {
              if (world.rank() == 0 || (later && i == 1)) b.set_requires_grad(true);
              if (later && (world.rank() == 1 || i == 1)) c.set_requires_grad(true);
              at::Tensor loss = at::zeros({});
              for (const auto& [name, one] : named) loss = loss + one.sum();
              engine.backward(loss);
            }
            engine.step();
          });
        },
        ThrowsMessage<Error>(HasSubstr("were frozen or unfrozen differently on rank 0 and rank 1")))
        << later << " " << trained;
  }
}

}  // namespace
}  // namespace plumb

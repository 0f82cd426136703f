// Losses that are sums: step() divides by everything that was summed, over backwards and ranks, as one process would.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <array>
#include <functional>
#include <limits>
#include <random>

#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// Rows of rank r's micro-batch m. Rank 1 has none in the first.
int64_t rows(int rank, int micro) { return rank == 1 && micro == 0 ? 0 : 3 + 5 * rank + 2 * micro; }

at::Tensor batch(int rank, int micro) {
  torch::Generator generator = at::detail::createCPUGenerator(10 * rank + micro + 1);
  return torch::randn({rows(rank, micro), 6}, generator, at::kDouble);
}

torch::nn::Linear make_model() {
  torch::nn::Linear model(6, 4);
  model->to(at::kDouble);
  at::NoGradGuard no_grad;
  torch::Generator generator = at::detail::createCPUGenerator(1);  // of its own: ranks are threads
  for (auto& parameter : model->parameters()) parameter.normal_(0, 0.3, generator);
  return model;
}

class WeightsIn : public testing::TestWithParam<std::string> {};

TEST_P(WeightsIn, MakeTheStepOfOneProcessWithAllTokens) {
  for (const bool held : {false, true}) {
    run_local(2, [&](World world) {
      auto model = make_model();
      Engine engine(world, *model, SGD{.lr = 0.1}, {.strategy = GetParam(), .clip_norm = 0.3});
      for (int micro = 0; micro < 3; ++micro) {
        const at::Tensor x = batch(world.rank(), micro);
        std::optional<NoSync> scope;
        if (held && micro < 2) scope.emplace(engine);
        engine.backward(x.numel() > 0 ? model(x).square().sum() : at::Tensor(), false, static_cast<double>(x.size(0)));
      }
      const StepInfo info = engine.step();

      auto twin = make_model();
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < 2; ++rank) {
        for (int micro = 0; micro < 3; ++micro) all.push_back(batch(rank, micro));
      }
      const at::Tensor x = at::cat(all);
      (twin(x).square().sum() / x.size(0)).backward();
      const double norm = torch::nn::utils::clip_grad_norm_(twin->parameters(), 0.3);
      torch::optim::SGD(twin->parameters(), 0.1).step();
      EXPECT_NEAR(info.grad_norm.item<double>(), norm, 1e-9 * norm);
      EXPECT_TRUE(torch::allclose(engine.full_parameter(model->weight), twin->weight, 1e-12, 1e-12));
      EXPECT_TRUE(torch::allclose(engine.full_parameter(model->bias), twin->bias, 1e-12, 1e-12));
    });
  }
}

TEST_P(WeightsIn, OfBackwardsWhoseGradientsWereClearedCountNothing) {
  run_local(2, [&](World world) {
    auto model = make_model();
    Engine engine(world, *model, SGD{.lr = 0.1}, {.strategy = GetParam()});
    engine.backward(model(batch(world.rank(), 1)).square().sum(), false, 100.0);
    for (const auto& parameter : model->parameters()) parameter.mutable_grad().reset();  // nobody is told
    engine.backward(model(batch(world.rank(), 2)).square().sum(), false, static_cast<double>(rows(world.rank(), 2)));
    engine.step();

    auto twin = make_model();
    const at::Tensor x = at::cat({batch(0, 2), batch(1, 2)});
    (twin(x).square().sum() / x.size(0)).backward();
    torch::optim::SGD(twin->parameters(), 0.1).step();
    EXPECT_TRUE(torch::allclose(engine.full_parameter(model->weight), twin->weight, 1e-12, 1e-12));
  });
}

// A loss that happens to have no gradient on this rank weighs what it weighs.
TEST_P(WeightsIn, OfBackwardsWithoutAnyGradientCount) {
  run_local(1, [&](World world) {
    auto model = make_model();
    Engine engine(world, *model, SGD{.lr = 1.0}, {.strategy = GetParam()});
    const at::Tensor before = model->bias.detach().clone();
    engine.backward(model(batch(0, 1)).sum() * 0.0, false, 3.0);
    engine.backward(model->bias.sum() * 4.0, false, 1.0);
    engine.step();
    EXPECT_TRUE(torch::allclose(engine.full_parameter(model->bias), before - 1.0));
  });
}

// All tokens of all ranks' micro-batches from `first` on, in one process.
torch::nn::Linear one_process_from(int first) {
  auto twin = make_model();
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < 2; ++rank) {
    for (int micro = first; micro < 3; ++micro) all.push_back(batch(rank, micro));
  }
  const at::Tensor x = at::cat(all);
  (twin(x).square().sum() / x.size(0)).backward();
  torch::optim::SGD(twin->parameters(), 0.1).step();
  return twin;
}

// Alone in the step, or beside another backward.
TEST_P(WeightsIn, OfSeveralBackwardsInOnePassAddUp) {
  for (const bool deterministic : {false, true}) {
    for (const int inside : {2, 3}) {
      run_local(2, [&](World world) {
        auto model = make_model();
        Engine engine(world, *model, SGD{.lr = 0.1},
                      {.strategy = GetParam(),
                       .bucket_bytes = 64,
                       .first_bucket_bytes = 64,
                       .deterministic = deterministic,
                       .virtual_ranks = inside == 3 ? 2 : 4});
        const auto run = [&](int micro) {
          const at::Tensor x = batch(world.rank(), micro);
          const auto weight = static_cast<double>(x.size(0));
          engine.backward(x.numel() > 0 ? model(x).square().sum() : at::Tensor(), false, weight);
        };
        if (inside == 2) run(0);
        {
          const auto pass = engine.pass();
          for (int micro = 3 - inside; micro < 3; ++micro) run(micro);
        }
        engine.step();
        auto twin = one_process_from(0);
        EXPECT_TRUE(torch::allclose(engine.full_parameter(model->weight), twin->weight, 1e-12, 1e-12)) << inside;
        EXPECT_TRUE(torch::allclose(engine.full_parameter(model->bias), twin->bias, 1e-12, 1e-12)) << inside;
      });
    }
  }
}

// Whichever of its backwards failed: all of them are run again.
TEST_P(WeightsIn, OfAPassThatFailedCountNothing) {
  for (int which = 0; which < 2; ++which) {
    run_local(2, [&](World world) {
      auto model = make_model();
      Engine engine(world, *model, SGD{.lr = 0.1}, {.strategy = GetParam()});
      const auto run = [&](bool fails) {
        const auto pass = engine.pass();
        for (int i = 0; i < 2; ++i) {
          const at::Tensor y = model(batch(world.rank(), 1 + i));
          if (fails && i == which) {
            y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
          }
          try {
            engine.backward(y.square().sum(), false, static_cast<double>(y.size(0)));
          } catch (const std::exception&) {
            EXPECT_TRUE(fails && i == which);
          }
        }
      };
      EXPECT_ANY_THROW(run(world.rank() == 1));
      engine.zero_grad();
      run(false);
      engine.step();
      EXPECT_TRUE(torch::allclose(engine.full_parameter(model->weight), one_process_from(1)->weight, 1e-12, 1e-12))
          << which;
    });
  }
}

// Every rank hears of it, and may run the pass again with weights alone.
TEST_P(WeightsIn, OfAPassBelongToAllOfItsBackwards) {
  for (const bool weighted_first : {false, true}) {
    run_local(2, [&](World world) {
      auto model = make_model();
      Engine engine(world, *model, SGD{.lr = 0.1}, {.strategy = GetParam()});
      const auto run = [&](bool mixes) {
        const auto pass = engine.pass();
        for (int i = 0; i < 2; ++i) {
          const at::Tensor x = batch(world.rank(), 1 + i);
          const at::Tensor loss = model(x).square().sum();
          if (mixes && weighted_first == (i == 1)) {
            loss.backward();
          } else {
            engine.backward(loss, false, static_cast<double>(x.size(0)));
          }
        }
      };
      EXPECT_THAT([&] { run(world.rank() == 1); },
                  ThrowsMessage<std::exception>(
                      HasSubstr(world.rank() == 1 ? "give every backward of the pass a weight" : "failed on rank 1")));
      engine.zero_grad();
      run(false);
      engine.step();
      EXPECT_TRUE(torch::allclose(engine.full_parameter(model->weight), one_process_from(1)->weight, 1e-12, 1e-12));
    });
  }
}

// Drawn: backwards that succeed and fail, with weights of any size, gradients that were cleared by whom nobody told, and steps, of
// parameters of which a rank may hold nothing.
TEST_P(WeightsIn, OfAnyHistoryAreThoseOfTheGradientsThatAreThere) {
  constexpr int everywhere = 2;
  for (int seed = 1; seed <= 30 && !HasFailure(); ++seed) {
    run_local(2, [&](World world) {
      std::mt19937 random(seed);  // the same on every rank
      const auto among = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
      const int64_t size = std::array{1, 3, 16, 50}[among(4)];
      at::Tensor p = at::zeros({size}, at::kDouble).requires_grad_();
      Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
      double value = 0, sum = 0, weight = 0;
      std::string told = c10::str("seed ", seed, ", ", size, " elements:");
      const auto clear = [&](bool aloud) {
        aloud ? engine.zero_grad() : p.mutable_grad().reset();
        sum = weight = 0;
      };
      const auto run = [&](int failing) {
        const at::Tensor mine = p.detach() + p;  // a graph of its own
        double own = 0, gradient = 0;
        for (int rank = 0; rank < 2; ++rank) {
          const int weighs = among(4) + (rank == 0 ? 1 : 0), brings = weighs == 0 ? 0 : 1 + among(5);
          if (failing < 0) sum += brings;
          if (failing < 0) weight += weighs;
          if (rank != world.rank()) continue;
          own = weighs;
          gradient = brings;
        }
        const at::Tensor loss = own > 0 ? (mine * gradient).sum() : at::Tensor();
        const auto fail = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); };
        if (failing == world.rank()) mine.register_hook(fail);
        if (failing == everywhere && loss.defined()) loss.register_hook(fail);
        engine.backward(loss, false, own);
      };
      for (int move = 0; move < 12; ++move) {
        const int what = among(8);
        told += c10::str(" ", what);
        if (what < 3) {
          run(-1);
        } else if (what == 3) {
          const bool partly = among(2) == 0;  // or before it brought anything
          EXPECT_ANY_THROW(run(partly ? 0 : everywhere)) << told;
          if (partly) clear(among(2) == 0);
        } else if (what < 6) {
          clear(what == 4);
        } else if (weight > 0) {
          engine.step();
          value -= sum / weight;
          EXPECT_TRUE(at::allclose(engine.full_parameter(p), at::full_like(p, value), 1e-9, 1e-9))
              << told << ": " << engine.full_parameter(p)[0].item<double>() << " instead of " << value;
          clear(true);
        }
      }
    });
  }
}

// What becomes of them is the same on every rank, also where a rank's piece has zeros alone, or no element.
TEST_P(WeightsIn, AreThoseOfAGradientThatTheUserChangesBetweenBackwards) {
  const std::vector<std::pair<std::string, std::function<void(at::Tensor&)>>> changes = {
      {"left", [](at::Tensor&) {}},
      {"scaled", [](at::Tensor& gradient) { gradient.mul_(0.5); }},
      {"scaled anew", [](at::Tensor& gradient) { gradient = gradient * 0.5; }},
      {"clamped", [](at::Tensor& gradient) { gradient.clamp_min_(0); }},
      {"clamped anew", [](at::Tensor& gradient) { gradient = gradient.clamp_min(0); }},
      {"zeroed", [](at::Tensor& gradient) { gradient.zero_(); }},
      {"zeroed anew", [](at::Tensor& gradient) { gradient = gradient * 0; }},
      {"dropped", [](at::Tensor& gradient) { gradient.reset(); }},
  };
  for (const auto& [what, change] : changes) {
    for (const int64_t size : {1, 3, 50}) {
      for (const int64_t alone : {int64_t{0}, size - 1}) {  // where the first gradient is above zero
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(what, ", ", size, " elements, ", alone));
          at::Tensor p = at::zeros({size}, at::kDouble).requires_grad_();
          Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
          at::Tensor first = at::full({size}, -1.0, at::kDouble), wanted;
          first[alone] = 4.0;
          for (int step = 0; step < 2; ++step) {
            engine.backward((p * first).sum(), false, 2.0);
            change(p.mutable_grad());
            engine.backward(3.0 * p.sum(), false, 1.0 + world.rank());
            engine.step();
            engine.zero_grad();
            at::Tensor sum = 2 * first;
            change(sum);
            const bool nothing = !sum.defined() || sum.eq(0).all().item<bool>();
            sum = (nothing ? at::zeros_like(first) : sum) + 6;
            sum = sum / (nothing ? 3.0 : 7.0);
            wanted = wanted.defined() ? wanted - sum : -sum;
            EXPECT_TRUE(at::allclose(engine.full_parameter(p), wanted))
                << step << ": " << engine.full_parameter(p) << wanted;
          }
        });
      }
    }
  }
}

// A rank that brought none, or holds no element, cannot see that they were cleared: the others do.
TEST_P(WeightsIn, OfClearedGradientsCountNowhereAlsoWhereARankHasNone) {
  for (const bool held : {false, true}) {
    for (const bool engines : {false, true}) {
      for (const int brings : {0, 1}) {
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(held, " ", engines, " ", brings));
          at::Tensor p = at::zeros({12}).requires_grad_();
          Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
          for (int step = 1; step <= 2; ++step) {
            for (int cleared = 0; cleared < 2; ++cleared) {
              std::optional<NoSync> scope;
              if (held) scope.emplace(engine);
              engine.backward(world.rank() == brings ? (p[0] * 7.0).sum() : at::Tensor(), false, 5.0 + cleared);
              engine.backward(at::Tensor(), false, 1.0);
              scope.reset();
              engines ? engine.zero_grad() : p.mutable_grad().reset();
            }
            engine.backward(p.sum() * 3, false, 2.0);
            engine.step();
            EXPECT_TRUE(engine.full_parameter(p).eq(-1.5 * step).all().item<bool>()) << engine.full_parameter(p);
            engine.zero_grad();
          }
        });
      }
    }
  }
}

// They are sums still: repeated, it divides them, and what is added to them joins them.
TEST_P(WeightsIn, OfASkippedStepStayWithItsGradients) {
  const auto repair = [](const at::Tensor& p) { p.mutable_grad().nan_to_num_(0, 8, 8); };
  using Rest = std::function<void(Engine & engine, at::Tensor & p)>;
  const std::vector<std::tuple<std::string, double, Rest>> rests = {
      {"repeated", -2, [&](Engine&, at::Tensor& p) { repair(p); }},
      {"skipped again", -2,
       [&](Engine& engine, at::Tensor& p) {
         EXPECT_TRUE(engine.step().skipped);
         repair(p);
       }},
      {"added to", -3,
       [&](Engine& engine, at::Tensor& p) {
         repair(p);
         engine.backward((p * 10).sum(), false, 2.0);
       }},
      {"cleared", -5,
       [](Engine& engine, at::Tensor& p) {
         p.mutable_grad().reset();
         engine.backward((p * 10).sum(), false, 2.0);
       }},
      {"cleared by the engine", -10,
       [](Engine& engine, at::Tensor& p) {
         engine.zero_grad();
         (p * 10).sum().backward();
       }},
      {"cleared, and of another kind", -10,
       [](Engine&, at::Tensor& p) {
         p.mutable_grad().reset();
         (p * 10).sum().backward();
       }},
      {"set by hand", -7,
       [](Engine& engine, at::Tensor& p) {
         engine.zero_grad();
         p.mutable_grad() = at::full({16}, 7.0);
       }},
  };
  for (const auto& [what, wanted, rest] : rests) {
    run_local(2, [&](World world) {
      at::Tensor p = at::zeros({16}).requires_grad_();
      Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1},
                    {.strategy = GetParam(), .nonfinite = NonFinite::skip});
      engine.backward((p * 8).sum() + p[0] * (world.rank() == 1 ? INFINITY : 0), false, 4.0);
      EXPECT_TRUE(engine.step().skipped);
      rest(engine, p);
      EXPECT_FALSE(engine.step().skipped);
      EXPECT_EQ(engine.full_parameter(p)[1].item<double>(), wanted) << what;
      engine.zero_grad();
      (p * 3).sum().backward();
      engine.step();
      EXPECT_EQ(engine.full_parameter(p)[1].item<double>(), wanted - 3) << what;
    });
  }
}

TEST_P(WeightsIn, OfASkippedStepAreNotMixedWithBackwardsThatHaveNone) {
  run_local(2, [&](World world) {
    at::Tensor p = at::zeros({16}).requires_grad_();
    Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1},
                  {.strategy = GetParam(), .nonfinite = NonFinite::skip});
    engine.backward(p.sum() * INFINITY, false, 4.0);
    EXPECT_TRUE(engine.step().skipped);
    p.sum().backward();
    EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<Error>(HasSubstr("that a skipped step left")));
  });
}

TEST_P(WeightsIn, JoinNoGradientsThatWereSetWhereTheirsWereCleared) {
  run_local(2, [&](World world) {
    at::Tensor p = at::zeros({16}).requires_grad_();
    Engine engine(world, NamedTensors{{"p", p}}, {}, SGD{.lr = 1}, {.strategy = GetParam()});
    engine.backward(p.sum(), false, 5.0);
    engine.zero_grad();
    p.mutable_grad() = at::ones({16});
    EXPECT_THAT([&] { engine.backward(p.sum(), false, 2.0); },
                ThrowsMessage<Error>(HasSubstr("clear them with zero_grad()")));
    engine.zero_grad();
    engine.backward((p * 4).sum(), false, 2.0);
    engine.step();
    EXPECT_TRUE(engine.full_parameter(p).eq(-2).all().item<bool>()) << engine.full_parameter(p);
  });
}

INSTANTIATE_TEST_SUITE_P(InEveryStrategy, WeightsIn, testing::Values("ddp", "zero1", "zero2", "zero3"),
                         [](const auto& info) { return info.param; });

TEST(WeightsOfAStep, BelongToAllOfItsBackwardsOnEveryRank) {
  run_local(2, [&](World world) {
    auto model = make_model();
    Engine engine(world, *model, SGD{.lr = 0.1});
    engine.backward(model(batch(0, 1)).sum(), false, world.rank() == 0 ? std::optional(2.0) : std::nullopt);
    EXPECT_THAT([&] { engine.step(); },
                ThrowsMessage<Error>(HasSubstr("rank 1 gave a weight to 0 of its 1 backwards")));
  });
}

TEST(WeightsOfAStep, AreCountsAndNotAllNothing) {
  auto model = make_model();
  Engine engine(World(), *model, SGD{.lr = 0.1});
  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT([&] { engine.backward(model(batch(0, 1)).sum(), false, wrong); },
                ThrowsMessage<Error>(HasSubstr("weight")));
  }
  engine.zero_grad();
  Engine other(World(), *make_model(), SGD{.lr = 0.1});
  other.backward({}, false, 0.0);
  EXPECT_THAT([&] { other.step(); }, ThrowsMessage<Error>(HasSubstr("no mean to take")));
}

TEST(WeightsOfAStep, JoinNoGradientsOfAnotherKind) {
  auto model = make_model();
  Engine engine(World(), *model, SGD{.lr = 0.1});
  engine.backward(model(batch(0, 1)).sum(), false, 2.0);
  engine.step();
  EXPECT_THAT([&] { engine.backward(model(batch(0, 1)).sum(), false, 2.0); },
              ThrowsMessage<Error>(HasSubstr("clear them with zero_grad()")));
}

// One that failed, here or elsewhere, is run again after zero_grad(): its first run weighs nothing.
TEST_P(WeightsIn, OfABackwardThatFailedCountNothing) {
  for (const bool after_a_good_one : {false, true}) {
    run_local(2, [&](World world) {
      auto model = make_model();
      Engine engine(world, *model, SGD{.lr = 0.1}, {.strategy = GetParam()});
      if (after_a_good_one) engine.backward(model(batch(world.rank(), 1)).square().sum(), false, 50.0);
      const at::Tensor y = model(batch(world.rank(), 2));
      if (world.rank() == 1) {
        y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      }
      EXPECT_ANY_THROW(engine.backward(y.square().sum(), false, 100.0));
      engine.zero_grad();
      engine.backward(model(batch(world.rank(), 2)).square().sum(), false, static_cast<double>(rows(world.rank(), 2)));
      engine.step();

      auto twin = make_model();
      const at::Tensor x = at::cat({batch(0, 2), batch(1, 2)});
      (twin(x).square().sum() / x.size(0)).backward();
      torch::optim::SGD(twin->parameters(), 0.1).step();
      EXPECT_TRUE(torch::allclose(engine.full_parameter(model->weight), twin->weight, 1e-12, 1e-12))
          << after_a_good_one;
    });
  }
}

// Which gradients there are is told by looking, at small parameters first: a large one alone counts as much.
TEST(WeightsOfAStep, AreThoseOfTheGradientsThatAreThereHoweverLarge) {
  for (const int64_t size : {1, 4096, 4097, 9000}) {
    at::Tensor unused = at::zeros({3}).requires_grad_(), a = at::zeros({size}).requires_grad_();
    Engine engine(World(), NamedTensors{{"unused", unused}, {"a", a}}, {}, SGD{.lr = 1});
    const auto last_of = [](const at::Tensor& tensor) { return tensor.detach()[-1].item<double>(); };
    engine.backward(2 * a.sum(), false, 100.0);
    a.mutable_grad().zero_();  // dropped: nothing is there, and nothing was weighed
    engine.backward(2 * a.sum(), false, 4.0);
    engine.backward((2 * a[-1]).sum(), false, 4.0);  // joins what is there
    engine.step();
    EXPECT_DOUBLE_EQ(last_of(a), -4.0 / 8) << size;
    EXPECT_THAT([&] { engine.backward(a.sum(), false, 2.0); },
                ThrowsMessage<Error>(HasSubstr("clear them with zero_grad()")))
        << size;
    EXPECT_THAT([&] { engine.backward(a.sum(), false, 2.0); },
                ThrowsMessage<Error>(HasSubstr("clear them with zero_grad()")))
        << "they are still there, " << size;
    engine.zero_grad();  // as it says
    engine.backward(2 * a.sum(), false, 4.0);
    engine.step();
    EXPECT_DOUBLE_EQ(last_of(a), -1.0) << size;
  }
}

}  // namespace
}  // namespace plumb

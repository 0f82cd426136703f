// Deterministic mode: the same bits on every number of ranks and in every strategy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <mutex>

#include "plumb/nn.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"

namespace plumb {
namespace {

constexpr int kShares = 8;

at::Tensor share(int step, int index) {
  auto generator = at::detail::createCPUGenerator(1000 * step + index);
  return at::randn({5, 6}, generator);
}

std::shared_ptr<scenarios::Net> net() {
  static std::mutex building;
  std::lock_guard lock(building);
  torch::manual_seed(11);
  return std::make_shared<scenarios::Net>();
}

Options options(const std::string& strategy) {
  Options all;
  all.strategy = strategy;
  all.deterministic = true;
  all.virtual_ranks = kShares;
  all.clip_norm = 0.1;
  all.bucket_bytes = 300;
  all.first_bucket_bytes = 100;
  return all;
}

std::vector<at::Tensor> train(const std::string& strategy, int ranks, const Options& settings) {
  std::vector<at::Tensor> result;
  run_local(ranks, [&](World world) {
    at::set_num_threads(1);
    const auto model = net();
    Engine engine(world, *model, AdamW{.lr = 0.02}, settings);
    const int mine = settings.virtual_ranks / ranks;
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < mine; ++i) {
        const auto x = share(step, world.rank() * mine + i);
        // Some shares leave parameters out.
        const auto loss = (world.rank() * mine + i) % 3 == 0 ? model->loss_left(x) : model->loss(x);
        (loss / mine).backward();
      }
      engine.step();
      if (step != 1) engine.zero_grad();
    }
    std::vector<at::Tensor> whole;
    for (const auto& p : model->parameters()) whole.push_back(engine.full_parameter(p));
    if (world.rank() == 0) result = whole;
  });
  (void)strategy;
  return result;
}

TEST(Deterministic, GivesTheSameBitsOnEveryWorldInEveryStrategy) {
  const auto expected = train("ddp", 1, options("ddp"));
  for (const Strategy& row : strategies()) {
    for (int ranks : {1, 2, 4, 8}) {
      const auto found = train(row.name, ranks, options(row.name));
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(found[i].equal(expected[i])) << row.name << " on " << ranks << " ranks, parameter " << i;
      }
    }
  }
}

TEST(Deterministic, IsCloseToTheUsualMode) {
  const auto expected = train("ddp", 1, options("ddp"));
  Options usual = options("zero2");
  usual.deterministic = false;
  const auto found = train("zero2", 2, usual);
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-3, 1e-4));
}

TEST(Deterministic, AMeshOfTwoAxesGivesTheSameBits) {
  const auto expected = train("ddp", 1, options("ddp"));
  for (const Mesh& mesh : {Mesh{2, 2}, Mesh{4, 1}, Mesh{1, 4}}) {
    Options all = options("zero2");
    all.mesh = mesh;
    const auto found = train("zero2", 4, all);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << mesh.replicate;
  }
}

TEST(Deterministic, WorldsThatCannotShareEvenlyAreRefused) {
  for (const auto& [ranks, shares] : {std::pair{3, 8}, {4, 6}, {2, 5}, {3, 12}, {2, 0}}) {
    Options all = options("ddp");
    all.virtual_ranks = shares;
    try {
      train("ddp", ranks, all);
      ADD_FAILURE() << ranks << " ranks shared " << shares;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("cannot share evenly"));
    }
  }
}

TEST(Deterministic, AStepWithTheWrongNumberOfBackwardsIsAnError) {
  run_local(2, [](World world) {
    const auto model = net();
    Engine engine(world, *model, AdamW{}, options("zero2"));
    model->loss(share(0, world.rank())).backward();
    try {
      engine.step();
      ADD_FAILURE() << "one backward counted as four";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("expected 4"));
    }
  });
}

// One that is put off comes when its share, or all of them, are in the sums, and is added to what is kept there.
TEST(Deterministic, AWeightGradientThatComesBetweenBackwardsCountsOnce) {
  const auto trained = [](const std::string& strategy, bool delayed, bool both) {
    std::vector<at::Tensor> result;
    run_local(2, [&](World world) {
      auto model = std::make_shared<torch::nn::Module>("delayed");
      Unit<nn::Linear> linear(nn::Linear(nn::LinearOptions{.in = 6, .out = 5, .delay_wgrad_compute = delayed}));
      model->register_module("linear", linear);
      {
        at::NoGradGuard no_grad;
        linear.get()->weight.copy_(at::arange(30).reshape({5, 6}).sin());
        linear.get()->bias.zero_();
      }
      Options all = options(strategy);
      all.virtual_ranks = 4;
      all.clip_norm.reset();
      Engine engine(world, *model, SGD{.lr = 0.1, .momentum = 0.9}, all);
      for (int step = 0; step < 4; ++step) {
        for (int i = 0; i < 2; ++i) {
          const at::Tensor x = share(step, 2 * world.rank() + i);
          at::Tensor loss = torch::tanh(linear(x)).pow(2).mean();
          if (both) {  // a plain use beside it
            const UnitScope scope(unit::door_of(linear.ptr()));
            loss = loss + at::linear(x, linear.get()->weight).sin().mean();
          }
          loss.backward();
          if (delayed && (step != 2 || i == 1)) linear->backward_dw();
        }
        engine.step();
        if (step != 1) engine.zero_grad();
      }
      std::vector<at::Tensor> whole;
      for (const auto& p : model->parameters()) whole.push_back(engine.full_parameter(p));
      if (world.rank() == 0) result = whole;
    });
    return result;
  };
  for (const Strategy& row : strategies()) {
    for (const bool both : {false, true}) {
      const auto expected = trained(row.name, false, both), found = trained(row.name, true, both);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-5, 1e-6))
            << row.name << ", parameter " << i << (both ? ", used plainly, too" : "");
      }
    }
  }
}

// What a program may do to .grad between two shares, and after the last one, against the sums of one process.
TEST(Deterministic, GradientsMayBeReadClearedAndReplacedBeforeTheStep) {
  enum class Act { nothing, clears, assigns, halves };
  using enum Act;
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const auto& [between, after] : std::vector<std::pair<Act, Act>>{{nothing, nothing},
                                                                         {clears, nothing},
                                                                         {assigns, nothing},
                                                                         {halves, nothing},
                                                                         {nothing, clears},
                                                                         {nothing, assigns},
                                                                         {nothing, halves}}) {
      const bool pieces = strategy == "zero2";
      if (pieces && (between == halves || after == halves)) continue;  // refused: see below
      for (const bool keeps : {false, true}) {
        SCOPED_TRACE(c10::str(strategy, ", ", static_cast<int>(between), ", ", static_cast<int>(after), ", ", keeps));
        const auto gradient = [](int rank, int step, int share) {
          return at::arange(7, at::kDouble).mul(0.3).add(rank + 10 * step + 3 * share).sin();
        };
        run_local(2, [&](World world) {
          at::Tensor a = at::zeros({7}, at::kDouble).requires_grad_(), b = at::zeros({3}, at::kDouble).requires_grad_();
          Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1.0},
                        {.strategy = strategy, .deterministic = true, .virtual_ranks = 4});
          std::vector<at::Tensor> plain(2);  // what each rank has accumulated
          at::Tensor weight = at::zeros({7}, at::kDouble);
          const auto act = [&](Act what, int step) {
            if (what == nothing) return;
            const at::Tensor given = at::full({7}, 0.5 + step, at::kDouble);
            at::Tensor& mine = a.mutable_grad();
            if (what == halves) mine = mine * 0.5;
            if (what == clears) mine.reset();
            if (what == assigns) mine = given.clone();
            for (at::Tensor& one : plain)
              one = what == halves ? one * 0.5 : what == clears ? at::Tensor() : given.clone();
          };
          for (int step = 0; step < 3; ++step) {
            for (int share = 0; share < 2; ++share) {
              ((a * gradient(world.rank(), step, share)).sum() + b.sum()).backward();
              for (int rank = 0; rank < 2; ++rank) {
                const at::Tensor more = gradient(rank, step, share);
                plain[rank] = plain[rank].defined() ? plain[rank] + more : more;
              }
              if (!pieces) {
                EXPECT_TRUE(at::allclose(a.grad(), plain[world.rank()])) << "read after share " << share;
              }
              act(share == 0 ? between : after, step);
            }
            engine.step();
            const at::Tensor found = engine.full_gradient(a);
            ASSERT_EQ(found.defined(), plain[0].defined());
            if (found.defined()) {
              const at::Tensor mean = (plain[0] + plain[1]) / 2;
              EXPECT_TRUE(at::allclose(found, mean)) << "step " << step << ": " << found << mean;
              weight = weight - mean;
              plain = {mean, mean};
            }
            EXPECT_TRUE(at::allclose(engine.full_parameter(a), weight)) << "step " << step;
            if (!keeps) {
              engine.zero_grad();
              plain = {{}, {}};
            }
          }
        });
      }
    }
  }
}

// One of two in a bucket: the other's is kept, and what no gradient stands for is old.
TEST(Deterministic, AGradientClearedAloneBetweenStepsBeginsAnew) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({7}).requires_grad_(), b = at::zeros({3}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, NoOptimizer{},
                    {.strategy = strategy, .deterministic = true, .virtual_ranks = 4});
      for (int step = 1; step <= 3; ++step) {
        for (int share = 0; share < 2; ++share) ((a.sum() + b.sum()) * (world.rank() + 1)).backward();
        engine.step();
        EXPECT_TRUE(engine.full_gradient(a).eq(3).all().item<bool>()) << strategy << step;
        EXPECT_TRUE(engine.full_gradient(b).eq(3.0 * step).all().item<bool>()) << strategy << step;
        a.mutable_grad().reset();
      }
    });
  }
}

// In place or as another tensor, between two steps: the next shares are added to what it is then.
TEST(Deterministic, AGradientThatIsKeptOverAStepMayBeScaled) {
  for (const Strategy& row : strategies()) {
    for (const bool anew : {false, true}) {
      for (const bool both : {false, true}) {
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(row.name, anew ? ", anew" : ", in place", both ? ", both" : ""));
          at::Tensor a = at::zeros({7}).requires_grad_(), b = at::zeros({3}).requires_grad_();
          Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, NoOptimizer{},
                        {.strategy = row.name, .deterministic = true, .virtual_ranks = 4});
          double wanted_a = 0, wanted_b = 0;
          for (int step = 1; step <= 3; ++step) {
            for (int share = 0; share < 2; ++share) ((a.sum() + b.sum()) * (world.rank() + 1)).backward();
            engine.step();
            wanted_a += 3;
            wanted_b += 3;
            EXPECT_TRUE(engine.full_gradient(a).eq(wanted_a).all().item<bool>()) << engine.full_gradient(a);
            EXPECT_TRUE(engine.full_gradient(b).eq(wanted_b).all().item<bool>()) << engine.full_gradient(b);
            for (at::Tensor* one : {&a, &b}) {
              if (one == &b && !both) break;
              anew ? one->mutable_grad() = one->grad() * 0.5 : one->mutable_grad().mul_(0.5);
              (one == &a ? wanted_a : wanted_b) *= 0.5;
            }
            if (step != 2) continue;
            engine.step();  // without a share
            EXPECT_TRUE(engine.full_gradient(a).eq(wanted_a).all().item<bool>()) << engine.full_gradient(a);
            EXPECT_TRUE(engine.full_gradient(b).eq(wanted_b).all().item<bool>()) << engine.full_gradient(b);
          }
        });
      }
    }
  }
}

TEST(Deterministic, NobodyIsAnsweredForAllRanksBeforeTheStep) {
  for (const std::string strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({8}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1.0},
                    {.strategy = strategy, .deterministic = true, .virtual_ranks = 2});
      a.sum().backward();
      const auto refused = testing::ThrowsMessage<Error>(testing::HasSubstr("deterministic mode"));
      EXPECT_THAT([&] { engine.full_gradient(a); }, refused);
      EXPECT_THAT([&] { engine.grad_norm(); }, refused);
      if (strategy == "zero2") {
        EXPECT_THAT([&] { a.grad().norm(); }, refused);
      }
      engine.step();
      EXPECT_TRUE(engine.full_gradient(a).eq(1).all().item<bool>());
    });
  }
}

TEST(Deterministic, APieceComputedOfTheOneThatIsShownIsRefused) {
  for (const bool between : {false, true}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({8}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1.0},
                    {.strategy = "zero2", .deterministic = true, .virtual_ranks = 4});
      a.sum().backward();
      if (between) a.mutable_grad() = a.grad() * 0.5;
      const auto rest = [&] {
        a.sum().backward();
        if (!between) a.mutable_grad() = a.grad() * 0.5;
        engine.step();
      };
      EXPECT_THAT(rest, testing::ThrowsMessage<Error>(testing::HasSubstr("'a' was changed in place")));
    });
  }
}

// The sums of a step's shares are elsewhere until step(): a change of .grad would be lost.
TEST(Deterministic, AGradientChangedAfterTheLastShareIsAnError) {
  run_local(2, [](World world) {
    at::Tensor a = at::zeros({5}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1.0}, {.deterministic = true, .virtual_ranks = 2});
    a.sum().backward();
    a.mutable_grad().mul_(0.5);
    try {
      engine.step();
      ADD_FAILURE() << "a change was lost in silence";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("Options::clip_norm"), std::string::npos) << error.what();
    }
  });
}

// What no loss reached has no gradient: neither after a backward, nor after the step, which leaves it as it was.
// What is frozen for a step takes no part in it; the shares before its thaw are nothing of it, and those behind count as ever.
TEST(Deterministic, AParameterMayThawBetweenTwoShares) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const int ranks : {1, 2}) {
      for (int thaws = 0; thaws <= 4 / ranks; ++thaws) {
        run_local(ranks, [&](World world) {
          SCOPED_TRACE(c10::str(strategy, " on ", ranks, ", thaws after ", thaws, " shares"));
          at::Tensor a = at::zeros({40}).requires_grad_(), b = at::zeros({40}).requires_grad_();
          Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                        {.strategy = strategy,
                         .bucket_bytes = 64,
                         .first_bucket_bytes = 64,
                         .deterministic = true,
                         .virtual_ranks = 4});
          const int mine = 4 / ranks;
          double wanted_a = 0, wanted_b = 0;
          for (int step = 0; step < 4; ++step) {
            if (step == 1) b.set_requires_grad(false);
            for (int i = 0; i < mine; ++i) {
              if (step == 2 && i == thaws) b.set_requires_grad(true);
              const int share = world.rank() * mine + i + 1;
              (share * (a.sum() + 3 * b.sum()) * engine.share_weight()).backward();
            }
            if (step == 2) b.set_requires_grad(true);
            engine.step();
            engine.zero_grad();
            for (int share = 1; share <= 4; ++share) {
              wanted_a -= share / 4.0;
              const bool trained = step == 0 || step == 3 || (step == 2 && (share - 1) % mine >= thaws);
              if (trained) wanted_b -= 3 * share / 4.0;
            }
            EXPECT_TRUE(engine.full_parameter(a).eq(wanted_a).all().item<bool>()) << "step " << step;
            EXPECT_TRUE(engine.full_parameter(b).eq(wanted_b).all().item<bool>())
                << "step " << step << ": " << engine.full_parameter(b)[0] << " instead of " << wanted_b;
          }
        });
      }
    }
  }
}

// Also where its neighbour's memory is renewed meanwhile, since somebody keeps what was cleared.
TEST(Deterministic, AChangeInPlaceIsSeenBesideAGradientThatSomebodyKeeps) {
  for (const std::string strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor a = at::zeros({40}).requires_grad_(), b = at::zeros({40}).requires_grad_();
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                    {.strategy = strategy, .deterministic = true, .virtual_ranks = 4});
      (a.sum() + b.sum()).backward();
      const at::Tensor kept = a.grad();
      a.mutable_grad().reset();
      b.mutable_grad().mul_(2);
      EXPECT_THAT([&] { (a.sum() + b.sum()).backward(); },
                  testing::ThrowsMessage<std::exception>(
                      testing::AllOf(testing::HasSubstr("'b'"), testing::HasSubstr("was changed in place"))));
    });
  }
}

TEST(Deterministic, GivesUnusedParametersNoGradient) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor used = torch::ones({5}).requires_grad_(), unused = torch::ones({3}).requires_grad_();
      Options options{.strategy = strategy};
      options.deterministic = true;
      options.virtual_ranks = 4;
      Engine engine(world, NamedTensors{{"used", used}, {"unused", unused}}, {}, AdamW{.lr = 0.1, .weight_decay = 0.5},
                    options);
      for (int step = 0; step < 2; ++step) {
        for (int share = 0; share < 2; ++share) {
          (used.sum() / 2).backward();
          EXPECT_TRUE(used.grad().defined());
          EXPECT_FALSE(unused.grad().defined()) << strategy << ", share " << share << " of step " << step;
        }
        engine.step();
        EXPECT_FALSE(unused.grad().defined());
        EXPECT_TRUE(unused.detach().eq(1).all().item<bool>());
        EXPECT_FALSE(used.detach().eq(1).any().item<bool>());
        if (step == 0) engine.zero_grad();
      }
    });
  }
}

// Its shares are summed by then: one more would be nobody's. The step goes on, and so does training.
TEST(DeterministicStep, TakesNoBackwardBetweenItsBeginningAndItsEnd) {
  for (const std::string strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor weight = at::zeros({3}).requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, UserOptimizer{},
                    {.strategy = strategy, .deterministic = true, .virtual_ranks = 2});
      for (int step = 1; step <= 2; ++step) {
        weight.sum().backward();
        engine.begin_step();
        const auto refused = testing::ThrowsMessage<Error>(
            testing::AllOf(testing::HasSubstr("a backward between begin_step() and end_step() in deterministic mode"),
                           testing::HasSubstr("after end_step()"), testing::Not(testing::HasSubstr("defect"))));
        EXPECT_THAT([&] { weight.sum().backward(); }, refused);
        EXPECT_THAT([&] { engine.backward(weight.sum()); }, refused);
        EXPECT_THAT([&] { const auto pass = engine.pass(); }, refused);
        EXPECT_THAT([&] { engine.deliver(weight, at::ones({3})); }, refused);
        for (Piece& piece : engine.pieces()) {
          if (piece.gradient.defined() && piece.weight.numel() > 0) piece.weight.sub_(piece.gradient);
        }
        engine.end_step();
        engine.zero_grad();
        EXPECT_TRUE(engine.full_parameter(weight).equal(at::full({3}, -step))) << engine.full_parameter(weight);
      }
    });
  }
}

}  // namespace
}  // namespace plumb

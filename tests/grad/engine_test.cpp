// What a user sees of the engine beyond one model and one loop: rows A2, W4, W5, and lifetimes.
#include <gtest/gtest.h>

#include <barrier>
#include <ranges>
#include <thread>

#include "engine/impl.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"

namespace plumb {
namespace {

using scenarios::Net;
using scenarios::Normed;

at::Tensor leaf_of(std::initializer_list<double> values) {
  return at::tensor(std::vector<double>(values)).to(at::kFloat).requires_grad_();
}

void expect_close(const at::Tensor& found, std::initializer_list<double> expected) {
  const at::Tensor want = at::tensor(std::vector<double>(expected)).to(at::kFloat);
  EXPECT_TRUE(at::allclose(found.detach(), want, 1e-5, 1e-6)) << found << "\nexpected " << want;
}

TEST(NoSync, PutsNothingOnTheWire) {
  std::barrier together(2);
  run_local(2, [&](World world) {
    auto weight = leaf_of({1, 2});
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1});
    auto held = [&] {
      auto guard = engine.no_sync();
      for (int i = 0; i < 3; ++i) (weight * (world.rank() + 1)).sum().backward();
    };
    // Rank 1 begins only when rank 0 is through with its own: a single byte asked of rank 1 would keep rank 0 waiting.
    if (world.rank() == 0) held();
    together.arrive_and_wait();
    if (world.rank() == 1) held();
    EXPECT_TRUE(at::allclose(weight.grad(), at::full({2}, 3.0 * (world.rank() + 1))));
    engine.step();
    expect_close(weight, {1 - 4.5, 2 - 4.5});
  });
}

TEST(NoSync, EndsWithTheOutermostScope) {
  for (const char* strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      auto weight = leaf_of({1, 2});
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1},
                    {.strategy = strategy, .hold_unsharded = true});
      for (int step = 1; step <= 2; ++step) {
        {
          const auto outer = engine.no_sync();
          {
            const auto inner = engine.no_sync();
            (weight * (world.rank() + 1)).sum().backward();
          }
          (weight * (world.rank() + 1)).sum().backward();
          EXPECT_TRUE(at::allclose(weight.grad(), at::full({2}, 2.0 * (world.rank() + 1)))) << "this rank's alone";
        }
        weight.sum().backward();
        EXPECT_TRUE(at::allclose(engine.full_gradient(weight), at::full({2}, 4.0))) << "everybody's";
        engine.step();
        engine.zero_grad();
        expect_close(engine.full_parameter(weight), {1 - 4.0 * step, 2 - 4.0 * step});
      }
    });
  }
}

// A checkpoint keeps the order of the buckets: an engine that resumes has it before its first backward, and keeps it.
TEST(Order, OfACheckpointIsTakenOnceAndOnlyWhole) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      const auto build = [&](std::vector<at::Tensor>& leaves) {
        NamedTensors named;
        for (int i = 0; i < 5; ++i) {
          leaves.push_back(at::full({3 + i}, 1.0).requires_grad_());
          named.emplace_back("p" + std::to_string(i), leaves.back());
        }
        return std::make_unique<Engine>(world, named, NamedTensors{}, SGD{.lr = 1},
                                        Options{.strategy = strategy, .bucket_bytes = 40, .first_bucket_bytes = 40});
      };
      // Gradients come as `order` says: each product's backward runs before that of the one inside it.
      const auto train = [&](Engine& engine, const std::vector<at::Tensor>& leaves, const std::vector<int>& order) {
        at::Tensor loss = at::full({}, 0.5 * (world.rank() + 1));
        for (const int i : std::views::reverse(order)) loss = loss + leaves[i].sum() * (i + 1) * (world.rank() + 1);
        loss.backward();
        engine.step();
        engine.zero_grad();
      };
      const auto right = [&](const std::vector<at::Tensor>& leaves, double steps) {
        for (int i = 0; i < 5; ++i) {
          EXPECT_TRUE(leaves[i].detach().allclose(at::full({3 + i}, 1.0 - steps * 1.5 * (i + 1)))) << strategy << i;
        }
      };
      using Names = std::vector<std::string>;
      std::vector<at::Tensor> leaves, others, thirds;
      const auto first = build(leaves), second = build(others), third = build(thirds);
      const Names start = first->impl().reducer->order();
      EXPECT_EQ(start, (Names{"p4", "p3", "p2", "p1", "p0"})) << "as gradients mostly come";
      train(*first, leaves, {2, 0, 4, 1, 3});
      right(leaves, 1);
      const Names found = first->impl().reducer->order();
      EXPECT_EQ(found, (Names{"p2", "p0", "p4", "p1", "p3"})) << strategy;

      Reducer& resumed = *second->impl().reducer;
      resumed.arrange({"p2", "p0", "p4", "p1"});
      EXPECT_EQ(resumed.order(), start) << "one is missing: of another model";
      EXPECT_FALSE(resumed.rebuilt());
      Names more = found;
      more.insert(more.begin() + 2, {"nobody's", "p2"});
      resumed.arrange(more);
      EXPECT_EQ(resumed.order(), found);
      EXPECT_TRUE(resumed.rebuilt());
      resumed.arrange(start);
      EXPECT_EQ(resumed.order(), found) << "once";
      for (int step = 0; step < 2; ++step) train(*second, others, {0, 1, 2, 3, 4});
      right(others, 2);
      EXPECT_EQ(resumed.order(), found) << "and no backward changes it again";

      // Gradients that are there already move along.
      for (int i = 0; i < 5; ++i) thirds[i].mutable_grad() = at::full({3 + i}, 1.5 * (i + 1));
      third->impl().reducer->arrange(found);
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(thirds[i].grad().eq(1.5 * (i + 1)).all().item<bool>()) << i;
      third->step();
      right(thirds, 1);
    });
  }
}

TEST(Engines, TwoInOneProcessTrainAGan) {
  // Each loss reaches the parameters of both; only its own engine steps.
  auto train = [](at::Tensor& g, at::Tensor& d, int rank, int size, const std::function<void(at::Tensor)>& backward,
                  const std::function<void(bool)>& step) {
    for (int round = 0; round < 3; ++round) {
      const double noise = 0.1 * (rank + 1) + round;
      for (const bool generator : {false, true}) {
        auto fake = (g * noise).tanh();
        auto loss = ((d * fake).sum() * (generator ? 1.0 : -1.0) + (d * noise).pow(2).sum()) / size;
        backward(loss);
        step(generator);
      }
    }
  };
  for (int ranks : {1, 2, 3}) {
    run_local(ranks, [&](World world) {
      auto g = leaf_of({0.3, -0.2, 0.7}), d = leaf_of({0.5, 0.1, -0.4});
      Engine generator(world, NamedTensors{{"g", g}}, {}, SGD{.lr = 0.1}),
          discriminator(world, NamedTensors{{"d", d}}, {}, SGD{.lr = 0.1});
      train(
          g, d, world.rank(), 1, [](at::Tensor loss) { loss.backward(); },
          [&](bool turn) {
            // The other's gradient is dropped, but its backwards were run: both settle.
            if (turn)
              discriminator.zero_grad();
            else
              generator.zero_grad();
            generator.step();
            discriminator.step();
            generator.zero_grad();
            discriminator.zero_grad();
          });
      // One process: all ranks' losses summed, each weighted 1/N.
      auto rg = leaf_of({0.3, -0.2, 0.7}), rd = leaf_of({0.5, 0.1, -0.4});
      for (int round = 0; round < 3; ++round) {
        for (const bool turn : {false, true}) {
          at::Tensor total = at::zeros({});
          for (int rank = 0; rank < ranks; ++rank) {
            const double noise = 0.1 * (rank + 1) + round;
            auto fake = (rg * noise).tanh();
            total = total + ((rd * fake).sum() * (turn ? 1.0 : -1.0) + (rd * noise).pow(2).sum()) / ranks;
          }
          rg.mutable_grad().reset();
          rd.mutable_grad().reset();
          total.backward();
          at::NoGradGuard no_grad;
          if (turn)
            rg -= 0.1 * rg.grad();
          else
            rd -= 0.1 * rd.grad();
        }
      }
      EXPECT_TRUE(at::allclose(g.detach(), rg.detach(), 1e-4, 1e-6)) << ranks << "\n" << g << rg;
      EXPECT_TRUE(at::allclose(d.detach(), rd.detach(), 1e-4, 1e-6)) << ranks << "\n" << d << rd;
    });
  }
}

TEST(Buffers, AreRankZerosAfterConstructionAndAfterEveryStep) {
  std::vector<at::Tensor> means(3), counts(3);
  std::vector<at::Tensor> firsts(3);
  run_local(3, [&](World world) {
    Normed model;
    model.norm->running_mean.fill_(world.rank());
    Engine engine(world, model, SGD{.lr = 0.1});
    firsts[world.rank()] = model.norm->running_mean.clone();
    for (int step = 0; step < 2; ++step) {
      model.loss(at::full({4, 6}, world.rank() + 1.0) + at::arange(6.0)).backward();
      engine.step();
      engine.zero_grad();
    }
    means[world.rank()] = model.norm->running_mean.clone();
    counts[world.rank()] = model.norm->num_batches_tracked.clone();
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(at::equal(firsts[rank], at::zeros({8})));
    EXPECT_TRUE(at::equal(means[rank], means[0]));
    EXPECT_EQ(counts[rank].item<int64_t>(), 2);
  }
  EXPECT_GT(means[0].abs().max().item<double>(), 0);
}

TEST(Parameters, AreRankZerosAfterConstruction) {
  run_local(3, [&](World world) {
    auto weight = leaf_of({1.0 + world.rank(), 5});
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{});
    expect_close(weight, {1, 5});
  });
}

TEST(Engine, WithoutAnOptimizerServesTheUsersOwn) {
  run_local(2, [&](World world) {
    auto weight = leaf_of({1, 2});
    Engine engine(world, NamedTensors{{"w", weight}}, {});
    torch::optim::Adam optimizer({weight}, torch::optim::AdamOptions(0.5));
    (weight * (world.rank() * 2 + 1)).sum().backward();
    expect_close(weight.grad(), {2, 2});
    engine.step();
    optimizer.step();
    expect_close(weight, {0.5, 1.5});
  });
}

// torch's optimizers clear gradients by detaching them in place.
TEST(Engine, GradientsCanBeDetachedInPlace) {
  for (const char* strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      auto weight = leaf_of({1, 2, 3});
      Engine engine(world, NamedTensors{{"w", weight}}, {}, NoOptimizer{}, {.strategy = strategy});
      for (int i = 0; i < 2; ++i) {
        (weight * (world.rank() + 1)).sum().backward();
        weight.mutable_grad().detach_();
        weight.mutable_grad().zero_();
      }
      EXPECT_FALSE(weight.grad().is_view());
    });
  }
}

// Any of several in one bucket, wherever the ranks' parts of it end.
TEST(Engine, GivesTheWholeOfAGradientThatTheUserReplaced) {
  for (const char* strategy : {"ddp", "zero2", "zero3"}) {
    run_local(3, [&](World world) {
      const std::vector<int64_t> sizes = {3, 7, 1, 12, 5};
      NamedTensors named;
      for (const int64_t size : sizes) {
        named.emplace_back("p" + std::to_string(size), at::zeros({size}).requires_grad_());
      }
      Engine engine(world, named, {}, SGD{}, {.strategy = strategy});
      const auto numbers = [&](size_t i) { return at::arange(sizes[i], at::kFloat) + 1; };
      for (size_t replaced = 0; replaced < sizes.size(); ++replaced) {
        at::Tensor loss = at::zeros({});
        for (size_t i = 0; i < sizes.size(); ++i) {
          loss = loss + (named[i].second * numbers(i)).sum() * (world.rank() + 1 + static_cast<int>(i));
        }
        loss.backward();
        at::Tensor& gradient = named[replaced].second.mutable_grad();
        const at::Tensor before = gradient;
        gradient = gradient * 0.5;
        for (size_t i = 0; i < sizes.size(); ++i) {
          const double mean = (2.0 + static_cast<double>(i)) * (i == replaced ? 0.5 : 1.0);
          EXPECT_TRUE(at::allclose(engine.full_gradient(named[i].second), numbers(i) * mean))
              << strategy << ": of " << i << ", replaced " << replaced;
        }
        gradient = before;
        EXPECT_TRUE(at::allclose(engine.full_gradient(named[replaced].second),
                                 numbers(replaced) * (2.0 + static_cast<double>(replaced))))
            << strategy << ": to be asked changes nothing";
        engine.zero_grad();
      }
    });
  }
}

TEST(Engine, LeavesAUsableModelBehind) {
  run_local(2, [&](World world) {
    auto weight = leaf_of({1, 2});
    at::Tensor kept;
    {
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1});
      kept = (weight * 3).sum();
      kept.backward({}, true);
      engine.step();
    }
    weight.mutable_grad().reset();
    kept.backward();
    (weight * (world.rank() + 1)).sum().backward();  // this rank's alone, nobody reduces it
    EXPECT_TRUE(at::allclose(weight.grad(), at::full({2}, 4.0 + world.rank())));
    expect_close(weight, {-2, -1});
  });
}

TEST(Engine, TakesBackwardsFromSeveralThreadsAtOnce) {
  for (int ranks : {1, 2}) {
    run_local(ranks, [&](World world) {
      auto weight = at::zeros({64, 64}).requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1});
      constexpr int kThreads = 3, kEach = 20;
      {
        // Threads overlap differently on each rank; held backwards are counted, not reduced, one by one.
        auto guard = engine.no_sync();
        engine.backward(weight.sum() * 0);  // one pass is open from here on
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t) {
          threads.emplace_back([&] {
            for (int i = 0; i < kEach; ++i) (weight * 1.0).sum().backward();
          });
        }
        for (auto& thread : threads) thread.join();
      }
      EXPECT_TRUE(at::allclose(weight.grad(), at::full({64, 64}, 1.0 * kThreads * kEach)));
    });
  }
}

TEST(Pass, IsOneHoweverManyBackwardsRunInsideTheBackward) {
  run_local(2, [&](World world) {
    Net net;
    Engine engine(world, net, SGD{});
    const scenarios::Checkpoint::Body middle = [&](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    const auto h = torch::tanh(net.body->forward(at::ones({2, 6})));
    net.left->forward(scenarios::checkpoint(middle, scenarios::checkpoint(middle, h))).sum().backward();
    EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, 1);
    net.loss(at::ones({2, 6})).backward();
    EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, 2);
    torch::autograd::grad({net.loss(at::ones({2, 6}))}, {net.body->weight});
    EXPECT_EQ(engine.impl().reducer->here(Where::Kind::backward).pass, 2) << "autograd::grad is no pass";
  });
}

TEST(Engine, ReportsTheNormBeforeClipping) {
  run_local(2, [&](World world) {
    auto weight = leaf_of({0, 0});
    Options options;
    options.clip_norm = 1.0;
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, options);
    (weight * at::tensor({6.0, 8.0}).to(at::kFloat) * (world.rank() == 0 ? 2.0 : 0.0)).sum().backward();
    const StepInfo info = engine.step();
    EXPECT_NEAR(info.grad_norm.item<double>(), 10.0, 1e-5);
    expect_close(weight, {-0.6, -0.8});
  });
}

}  // namespace
}  // namespace plumb

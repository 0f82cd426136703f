// What ranks must agree on, where little is said: gradients that leave no trace on one of them, ranks that sit a pass out, and an
// engine whose communication has ended.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "errors.h"
#include "grad/support/leaf.h"
#include "plumb/fused.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"
#include "watch/wire.h"

namespace plumb {
namespace {

using test::errors;
using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;

using test::leaf;

// A tensor of its own beside the engine's is told as the engine's own is. A piece of nothing was neither cleared, nor changed or
// left where the other ranks' was cleared.
TEST(AgreedGradients, ThatOneRankAloneClearedAreNamedWhereTheOthersHoldNothingOfThem) {
  for (const int who : {0, 1, 2}) {
    for (const bool clears : {true, false}) {
      for (const bool between : {true, false}) {
        const auto graphs = errors(3, [&](World world) {
          at::Tensor a = at::ones({4}).requires_grad_(), b = leaf({3});
          Engine engine(world, NamedTensors{{"b", b}, {"a", a}}, {}, SGD{.lr = 1});
          (a.pow(2).sum() + b.sum()).backward({}, true, /*create_graph=*/true);
          if (world.rank() == who && clears) a.mutable_grad().reset();
          if (world.rank() == who && !clears) a.grad().detach().mul_(2);
          try {
            if (between) (a.sum() + b.sum()).backward();
            engine.step();
          } catch (...) {
            for (const at::Tensor& p : {a, b}) p.mutable_grad().reset();  // a gradient with a graph holds its parameter
            throw;
          }
        });
        const std::string did = clears ? "cleared" : "changed in place";
        EXPECT_THAT(graphs, Each(AllOf(HasSubstr("'a'"), HasSubstr("alike on every rank"),
                                       HasSubstr(who == 0   ? "was " + did + " on rank 0 and left on rank 1"
                                                 : who == 1 ? "was left on rank 0 and " + did + " on rank 1"
                                                            : "was left on rank 0 and " + did + " on rank 2"))));
      }
    }
    if (who == 2) continue;
    // Sixteen elements of two ranks' thirty-two: the second has none of them.
    const auto pieces = errors(2, [&](World world) {
      at::Tensor a = leaf({16}), b = leaf({16});
      Engine engine(world, NamedTensors{{"b", b}, {"a", a}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
      (a.sum() + b.sum()).backward();
      at::Tensor& first = engine.impl().reducer->sinks()[0].grad();
      EXPECT_EQ(first.numel(), world.rank() == 0 ? 16 : 0);
      if (world.rank() == who) first.reset();
      engine.step();
    });
    EXPECT_THAT(pieces, Each(HasSubstr("alike on every rank")));
  }
}

// Whatever two ranks did to a gradient that all had agreed on, and nobody else did the third.
TEST(AgreedGradients, ThatTwoRanksTreatedDifferentlyAreNamedWithWhatEachDid) {
  const std::vector<std::pair<std::string, std::function<void(at::Tensor&)>>> acts = {
      {"left", [](at::Tensor&) {}},
      {"cleared", [](at::Tensor& gradient) { gradient.reset(); }},
      {"changed in place", [](at::Tensor& gradient) { gradient.mul_(2); }}};
  for (const char* strategy : {"ddp", "zero2"}) {
    for (const auto& [one, act] : acts) {
      for (const auto& [other, act_of_other] : acts) {
        for (const bool between : {false, true}) {
          const auto texts = errors(2, [&](World world) {
            at::Tensor a = leaf({40}), b = leaf({3});
            Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = strategy});
            (a.sum() + b.sum()).backward();
            (world.rank() == 0 ? act : act_of_other)(a.mutable_grad());
            if (between) (a.sum() + b.sum()).backward();
            engine.step();
          });
          EXPECT_THAT(texts, Each(HasSubstr(one == other ? "none"
                                                         : "the reduced gradient of parameter 'a' was " + one +
                                                               " on rank 0 and " + other + " on rank 1")))
              << strategy;
        }
      }
    }
  }
}

// Nor do ranks differ in what they cleared because an operation of one of them has written since.
TEST(AgreedGradients, ThatWereClearedAreSoThoughAnOperationOfOneRankWroteNewOnes) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf({40}), b = leaf({3});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = strategy});
      for (int step = 1; step <= 3; ++step) {
        (a.sum() + b.sum()).backward();
        engine.zero_grad();
        if (world.rank() == 1) {
          const auto sink = sink_of(a);
          sink->put_off();
          const GradTarget target = sink->open();
          EXPECT_FALSE(target.accumulate);
          target.buffer.fill_(4);
          sink->wrote();
          sink->made_up();
        }
        if (step == 3) b.sum().backward();
        engine.step();
        engine.zero_grad();
        EXPECT_TRUE(engine.full_parameter(a).eq(-2 * step).all().item<bool>()) << strategy << ", step " << step;
        EXPECT_TRUE(engine.full_parameter(b).eq(step == 3 ? -1 : 0).all().item<bool>()) << strategy;
      }
    });
    EXPECT_THAT(texts, Each("none")) << strategy;
  }
}

// What an operation writes between two passes is no change of the user's, and hides none.
TEST(AgreedGradients, ThatOneRankAloneChangedAreNamedThoughAnOperationWroteThemSince) {
  for (const bool changed : {false, true}) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf({8});
      Engine engine(world, NamedTensors{{"layer.a", a}}, {}, SGD{.lr = 1});
      a.sum().backward();
      if (changed && world.rank() == 1) a.mutable_grad().mul_(2);
      const auto sink = sink_of(a);
      sink->put_off();
      const GradTarget target = sink->open();
      EXPECT_TRUE(target.accumulate);
      target.buffer.add_(world.rank());
      sink->wrote();
      sink->made_up();
      engine.step();
      EXPECT_TRUE(a.detach().eq(-1.5).all().item<bool>());
    });
    EXPECT_THAT(texts, Each(changed ? HasSubstr("'layer.a' was left on rank 0 and changed in place on rank 1")
                                    : HasSubstr("none")));
  }
}

// Each way to change a piece in place, of which one rank has nothing: all did the same.
TEST(AgreedGradients, ThatEveryRankChangedMayBeEmptyOnSome) {
  EXPECT_THAT(errors(3,
                     [](World world) {
                       at::Tensor a = leaf({16}), b = leaf({16}), c = leaf({16});
                       Engine engine(world, NamedTensors{{"a", a}, {"b", b}, {"c", c}}, {}, SGD{.lr = 1},
                                     {.strategy = "zero2"});
                       for (int step = 1; step <= 2; ++step) {
                         (a.sum() + b.sum() + c.sum()).backward();
                         for (const at::Tensor& p : {a, b, c}) p.mutable_grad().mul_(2);
                         (a.sum() + b.sum() + c.sum()).backward();
                         b.mutable_grad() = b.grad() * 2;
                         c.mutable_grad().clamp_max_(1);
                         engine.step();
                         engine.zero_grad();
                         EXPECT_TRUE(engine.full_parameter(a).eq(-3.0 * step).all().item<bool>());
                         EXPECT_TRUE(engine.full_parameter(b).eq(-6.0 * step).all().item<bool>());
                         EXPECT_TRUE(engine.full_parameter(c).eq(-1.0 * step).all().item<bool>());
                       }
                     }),
              Each("none"));
}

// Who said what is asked for only where there is something to tell: gradients that are kept, changed or cleared alike are nothing.
TEST(AgreedGradients, CostOneHostMessageInAPassAndOneInAStep) {
  for (const char* strategy : {"ddp", "zero2"}) {
    run_local(3, [&](World world) {
      at::Tensor a = leaf({30}), b = leaf({5});
      Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = strategy});
      const auto waits = [&] { return wire_counts(world)[static_cast<size_t>(Cargo::control)].waits; };
      for (int step = 0; step < 4; ++step) {
        const int64_t before = waits();
        (a.sum() + (world.rank() == 1 ? b.sum() : at::zeros({}))).backward();
        const int64_t between = waits();
        if (step > 0) {
          EXPECT_EQ(between - before, 1) << strategy << step;  // the first one tells the order of the buckets, too
        }
        if (step == 1) a.mutable_grad().mul_(2);
        if (step == 2) engine.zero_grad();
        engine.step();
        EXPECT_EQ(waits() - between, 1) << strategy << step;
      }
    });
  }
}

Reducer& reducer_of(Engine& engine) { return *engine.impl().reducer; }

// What rank 0 writes becomes everybody's: of the same parameters, all of them.
TEST(AgreedWrites, AreOfTheSameParametersOnEveryRank) {
  for (const char* strategy : {"ddp", "zero3"}) {
    for (const int other : {0, 2}) {
      const auto texts = errors(3, [&](World world) {
        at::Tensor a = leaf({5}), b = leaf({40}), c = leaf({3});
        Engine engine(world, NamedTensors{{"a", a}, {"b", b}, {"c", c}}, {}, SGD{.lr = 1}, {.strategy = strategy});
        const auto scope = engine.gathered({a, world.rank() == other ? c : b}, Access::write);
      });
      EXPECT_THAT(texts, Each(AllOf(HasSubstr("engine.gathered({'c', 'a'}, Access::write)"),
                                    HasSubstr("engine.gathered({'b', 'a'}, Access::write)"),
                                    HasSubstr("for the same parameters"))))
          << strategy;
    }
  }
}

// As of parameters outside of all units.
TEST(AgreedGradients, OfUnitsAreNotMovedBetweenParametersWhereTheyArePieces) {
  const auto texts = errors(2, [&](World world) {
    scenarios::Alike model(2);
    Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero3"});
    const auto run = [&] { model.layers[1]->forward(model.layers[0]->forward(at::ones({2, 6}))).sum().backward(); };
    run();
    const auto weights = model.parameters();
    const at::Tensor first = weights[0].grad(), second = weights[2].grad();
    weights[0].mutable_grad() = second;
    weights[2].mutable_grad() = first;
    run();
  });
  EXPECT_THAT(texts, Each(HasSubstr("is another parameter's piece")));
}

TEST(AbsentRanks, AreToldOfABackwardThatFailedElsewhere) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = leaf({3});
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    a.sum().backward();
    if (world.rank() == 1) {
      const at::Tensor kept = a.grad();
      EXPECT_THROW(reducer_of(engine).sit_out(), Error);
      EXPECT_TRUE(a.grad().is_same(kept)) << "and has its own gradient back";
      reducer_of(engine).sit_out();
    } else {
      at::Tensor y = a * 1;
      y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      EXPECT_ANY_THROW(engine.backward(y.sum()));
      a.mutable_grad().reset();
      a.sum().backward();
      EXPECT_TRUE(a.grad().eq(0.5).all().item<bool>()) << a.grad();
    }
  });
  EXPECT_THAT(texts, Each("none"));
}

// Parameters that others begin to train meanwhile become theirs, too.
TEST(AbsentRanks, AdmitWhatOthersBeginToTrain) {
  const auto texts = errors(2, [](World world) {
    at::Tensor a = leaf({3}), b = at::zeros({5});
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1});
    a.sum().backward();
    engine.step();
    engine.zero_grad();
    b.requires_grad_();
    if (world.rank() == 1) {
      reducer_of(engine).sit_out();
      EXPECT_FALSE(a.grad().defined());
    } else {
      (a.sum() + b.sum() * 4).backward();
      EXPECT_TRUE(b.grad().eq(2).all().item<bool>()) << b.grad();
      engine.zero_grad();
    }
    for (const at::Tensor& p : {a, b}) p.mutable_grad().reset();
    (a.sum() + b.sum()).backward();
    EXPECT_TRUE(b.grad().eq(1).all().item<bool>());
    engine.step();
    EXPECT_TRUE(b.detach().eq(-1).all().item<bool>());
  });
  EXPECT_THAT(texts, Each("none"));
}

// Nothing travels after that, and nobody waits for it: whatever is called says what ended it.
TEST(BrokenEngines, SayWhatEndedThem) {
  for (const char* strategy : {"ddp", "zero2"}) {
    const auto texts = errors(2, [&](World world) {
      at::Tensor a = leaf({40});
      Engine engine(world, NamedTensors{{"layer.a", a}}, {}, SGD{.lr = 1}, {.strategy = strategy});
      a.sum().backward();
      if (world.rank() == 1) a.mutable_grad().reset();
      EXPECT_THROW(engine.step(), Error);
      a.mutable_grad().reset();
      const std::vector<std::function<void()>> calls = {
          [&] { a.sum().backward(); },
          [&] { engine.backward(a.sum()); },
          [&] { engine.deliver(a, at::ones({40})); },
          [&] { engine.step(); },
          [&] { engine.full_gradient(a); },
          [&] { engine.grad_norm(); },
          [&] { const auto scope = engine.gathered({a}, Access::write); },
          [&] { engine.save("nowhere"); },
      };
      for (size_t i = 0; i < calls.size(); ++i) {
        std::string said = "nothing";
        try {
          calls[i]();
        } catch (const std::exception& error) {
          said = error.what();
        }
        EXPECT_THAT(said, AllOf(HasSubstr("communication ended with an earlier error"), HasSubstr("layer.a"))) << i;
      }
    });
    EXPECT_THAT(texts, Each("none")) << strategy;
  }
}

// Each waits in its own engine's pass for the other one: data that does not come, which the time-out ends.
TEST(Engines, CalledInAnotherOrderOnAnotherRankAreToldSo) {
  for (const std::string strategy : {"ddp", "zero2"}) {
    const auto texts = test::errors(
        2,
        [&](World world) {
          at::Tensor a = leaf({3}), b = leaf({5});
          Engine first(world, NamedTensors{{"a", a}}, {}, SGD{}, {.strategy = strategy});
          Engine second(world, NamedTensors{{"b", b}}, {}, SGD{}, {.strategy = strategy});
          (world.rank() == 0 ? a : b).sum().backward();
          (world.rank() == 0 ? b : a).sum().backward();
        },
        std::chrono::seconds(2 * patience));
    EXPECT_THAT(texts, Each(HasSubstr("rank 1"))) << strategy;
    EXPECT_THAT(texts, Contains(HasSubstr("either to different engines (run their backwards and steps in one order on "
                                          "every rank)")))
        << strategy;
  }
}

}  // namespace
}  // namespace plumb

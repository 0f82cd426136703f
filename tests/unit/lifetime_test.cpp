// When units are gathered and released: how often, for how long, and in which order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <thread>

#include "unit/support/chain.h"
#include "watch/wire.h"

namespace plumb {
namespace {

using namespace test;

int64_t layer_bytes(Engine& engine, int ranks) {
  int64_t bytes = 0;
  for (const Bucket& bucket : engine.impl().reducer->buckets()) bytes = std::max(bytes, bucket.numel * 4);
  EXPECT_GE(bytes, 42 * 4);
  EXPECT_EQ(bytes / 4 % ranks, 0);
  return bytes;
}

TEST(Lifetime, AUnitIsGatheredOnceForItsForwardAndOnceForItsBackward) {
  on_ranks(3, Gather::in_place, [](World, Chain& net, Engine& engine) {
    Units& units = *engine.impl().units;
    for (int step = 0; step < 2; ++step) {
      const int64_t before = units.gathers();
      const at::Tensor y = net.forward(ones);
      EXPECT_EQ(units.gathers() - before, 5);
      y.sum().backward({}, true);
      EXPECT_EQ(units.gathers() - before, 10);
      y.pow(2).sum().backward();
      EXPECT_EQ(units.gathers() - before, 15);
      engine.step();
      engine.zero_grad();
      EXPECT_EQ(units.gathers() - before, 15);
    }
  });
}

// A unit whose last gradient has come is not needed any more; where no gradients come, the two last ones stay.
// A node may have saved parameters of two kinds, a frozen and a trained one: it is done with both when it has run.
TEST(Lifetime, ABackwardLetsGoOfTheFrozenHalfOfAUnitToo) {
  struct Norms : torch::nn::Module {
    Norms() {
      for (int i = 0; i < 6; ++i) {
        norms.push_back(register_module("norm" + std::to_string(i),
                                        std::make_shared<torch::nn::LayerNormImpl>(torch::nn::LayerNormOptions({40}))));
        norms.back()->weight.set_requires_grad(false);
      }
    }
    std::vector<Unit<torch::nn::LayerNorm>> norms;
  };
  run_local(2, [](World world) {
    Norms net;
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    int64_t unit = 0, left = -1;
    {
      const Gathered scope = engine.gathered({net.norms[0]->weight, net.norms[0]->bias});
      unit = gathered(engine);
    }
    const at::Tensor x = torch::arange(80, at::kFloat).view({2, 40}).requires_grad_();
    x.register_hook([&](const at::Tensor&) { left = gathered(engine); });
    at::Tensor h = x;
    for (auto& norm : net.norms) h = norm->forward(h);
    h.square().sum().backward();
    EXPECT_LE(left, 3 * unit) << "of six";
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Lifetime, ABackwardKeepsTheTwoUnitsItNeededLast) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine& engine) {
    const int64_t one = layer_bytes(engine, 2);
    std::vector<int64_t> seen;
    const auto look = [&](const at::Tensor& h) {
      h.register_hook([&](const at::Tensor&) { seen.push_back(gathered(engine) / one); });
    };
    auto x = ones.clone().requires_grad_();
    auto y = net.forward(x, look);
    torch::autograd::grad({y.sum()}, {x}, {}, true);
    EXPECT_THAT(seen, testing::ElementsAre(0, 1, 2, 2, 2));
    seen.clear();
    y.sum().backward();
    EXPECT_THAT(seen, testing::ElementsAre(0, 0, 0, 0, 0));
  });
}

// What was frozen since the engine was built brings no gradient, and nobody waits for one.
TEST(Lifetime, AUnitIsLetGoWithItsLastGradientAlsoWhereAParameterIsFrozenSince) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine& engine) {
    for (const auto& item : net.named_parameters()) {
      if (item.key().ends_with("bias")) item.value().set_requires_grad(false);
    }
    std::vector<int64_t> seen;
    const auto look = [&](const at::Tensor& h) {
      h.register_hook([&](const at::Tensor&) { seen.push_back(gathered(engine)); });
    };
    net.forward(ones, look).sum().backward();
    EXPECT_THAT(seen, testing::ElementsAre(0, 0, 0, 0, 0));
  });
}

// Two units that take turns are gathered once each.
TEST(Lifetime, ABackwardComesBackToARecentUnitWithoutAGather) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine& engine) {
    auto x = ones.clone().requires_grad_();
    at::Tensor two = x, three = x;
    for (int i = 0; i < 6; ++i) two = torch::tanh(net.layers[i % 2]->forward(two));
    for (int i = 0; i < 6; ++i) three = torch::tanh(net.layers[i % 3]->forward(three));
    Units& units = *engine.impl().units;
    int64_t before = units.gathers();
    torch::autograd::grad({two.sum()}, {x});
    EXPECT_EQ(units.gathers() - before, 2);
    before = units.gathers();
    torch::autograd::grad({three.sum()}, {x});
    EXPECT_EQ(units.gathers() - before, 6);
    EXPECT_EQ(gathered(engine), 0);
  });
}

// Nothing is released under somebody who holds it, whatever backwards come and go.
TEST(Lifetime, AScopeKeepsItsParametersThroughBackwards) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine& engine) {
    const int64_t one = layer_bytes(engine, 2);
    const at::Tensor weight = net.layers[3]->weight, neighbour = net.layers[3]->bias;
    const auto outer = engine.gathered({weight});
    {
      const auto inner = engine.gathered({weight, neighbour, weight});
      net.forward(ones).sum().backward();
      EXPECT_EQ(gathered(engine), one);
    }
    net.forward(ones).sum().backward();
    EXPECT_EQ(gathered(engine), one);
    EXPECT_TRUE(at::isfinite(weight).all().item<bool>());
    EXPECT_TRUE(at::isfinite(neighbour).all().item<bool>());
  });
}

// Unpacks a weight, waits for `until`, and only then reads it.
struct Patient : torch::autograd::Function<Patient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            int64_t until) {
    context->save_for_backward({weight});
    context->saved_data["until"] = until;
    return torch::linear(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto weight = context->get_saved_variables()[0];
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["until"].toInt()))();
    return {gradients[0].matmul(weight), at::Tensor(), at::Tensor()};
  }
};

// One backward ends while a node of another reads: the unit stays for it.
TEST(Lifetime, TheEndOfOneBackwardTakesNothingFromAnother) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine& engine) {
    auto x = ones.clone().requires_grad_();
    auto z = ones.clone().requires_grad_();
    const at::Tensor other = net.forward(z).sum();
    std::function<void()> until = [&] {
      std::thread([&] { torch::autograd::grad({other}, {z}, {}, /*retain_graph=*/true); }).join();
      EXPECT_GT(gathered(engine), 0);
    };
    at::Tensor y;
    {
      UnitScope scope(unit::door_of(net.layers[2].ptr()));
      y = Patient::apply(x, net.layers[2].get()->weight, reinterpret_cast<int64_t>(&until));
    }
    EXPECT_EQ(gathered(engine), 0);
    for (int walk = 0; walk < 2; ++walk) {  // a node that is known already reads once more
      const at::Tensor gradient = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
      EXPECT_TRUE(at::allclose(gradient, torch::ones({2, 6}).matmul(engine.full_parameter(net.layers[2]->weight))));
      EXPECT_EQ(gathered(engine), 0);
    }
  });
}

// As a hook that looks at what a unit makes of something else, in a backward that reads no parameter of any.
TEST(Lifetime, AForwardInsideABackwardThatUsesNoUnitEndsWithIt) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine& engine) {
    at::Tensor seen;
    const at::Tensor x = ones.clone().requires_grad_();
    const at::Tensor y = x * 2;
    y.register_hook([&](const at::Tensor&) {
      const at::AutoGradMode grad(true);
      seen = net.layers[3]->forward(ones);
    });
    y.sum().backward();
    EXPECT_TRUE(seen.defined());
    EXPECT_EQ(gathered(engine), 0);
  });
}

// tanh saves its own output, inside a scope: a graph that is dropped is gone.
TEST(Lifetime, WhatIsSavedInAScopeDiesWithItsGraph) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine&) {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> output{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    {
      UnitScope scope(unit::door_of(net.layers[0].ptr()));
      at::Tensor y = torch::tanh(net.layers[0].get()->forward(ones));
      output = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(y.getIntrusivePtr());
      EXPECT_FALSE(output.expired());
    }
    EXPECT_TRUE(output.expired());
  });
}

// ---- gathers by collectives

// Whether ranks ask or not: a window is a window.
class LifetimeTogether : public testing::TestWithParam<Gather> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LifetimeTogether, testing::Values(Gather::together, Gather::asking),
                         [](const auto& info) { return info.param == Gather::asking ? "Ask" : "DoNotAsk"; });

// From the second pass on, whatever followed the last time is there before it is asked for, and nothing else.
TEST_P(LifetimeTogether, TheNextUnitIsGatheredAhead) {
  on_ranks(2, GetParam(), [](World, Chain& net, Engine& engine) {
    const int64_t one = layer_bytes(engine, 2);
    Units& units = *engine.impl().units;
    std::vector<int64_t> forward, backward;
    for (int step = 0; step < 3; ++step) {
      forward.clear();
      backward.clear();
      const int64_t before = units.gathers();
      at::Tensor h = ones;
      for (auto& layer : net.layers) {
        UnitScope scope(unit::door_of(layer.ptr()));
        h = torch::tanh(layer.get()->forward(h));
        forward.push_back(gathered(engine) / one);
        h.register_hook([&](const at::Tensor&) { backward.push_back(gathered(engine) / one); });
      }
      h.sum().backward();
      EXPECT_EQ(units.gathers() - before, step == 0 ? 10 : 9) << step;  // the last one stays for the backward
      EXPECT_EQ(gathered(engine), 0);
      engine.step();
      engine.zero_grad();
      if (step == 0) {
        EXPECT_THAT(forward, testing::ElementsAre(1, 1, 1, 1, 1));
      }
    }
    EXPECT_THAT(forward, testing::ElementsAre(2, 2, 2, 2, 1));
    EXPECT_THAT(backward, testing::Each(testing::Le(2)));
  });
}

// What was gathered ahead of a step that came first holds yesterday's values: nobody sees them.
TEST_P(LifetimeTogether, WhatWasGatheredAheadIsNotUsedAfterAStep) {
  on_ranks(2, GetParam(), [](World, Chain& net, Engine& engine) {
    for (int step = 0; step < 3; ++step) {
      net.forward(ones).sum().backward();
      const at::Tensor weight = net.layers[1]->weight;
      const at::Tensor wanted = engine.full_parameter(weight) - 0.1 * engine.full_gradient(weight);
      {
        at::NoGradGuard no_grad;
        net.layers[0]->forward(ones);  // the second layer follows
      }
      engine.step();
      engine.zero_grad();
      EXPECT_EQ(gathered(engine), 0);
      EXPECT_TRUE(at::allclose(engine.full_parameter(weight), wanted, 1e-6, 1e-7)) << step;
    }
  });
}

TEST_P(LifetimeTogether, WhatWasGatheredAheadIsNotUsedAfterShardsWereWritten) {
  on_ranks(2, GetParam(), [](World, Chain& net, Engine& engine) {
    for (const double value : {0.5, 0.25, 0.125}) {
      net.forward(ones).sum().backward();
      engine.zero_grad();
      at::NoGradGuard no_grad;
      net.layers[0]->forward(ones);  // the second layer follows
      for (const auto& [name, shard] : engine.shards()) at::Tensor(shard).fill_(value);
      engine.shards_written();
      EXPECT_EQ(gathered(engine), 0);
      for (auto& layer : net.layers) {
        EXPECT_TRUE(layer->forward(ones).eq(7 * value).all().item<bool>()) << value;
      }
    }
  });
}

// An order that changes costs gathers, and no numbers.
TEST_P(LifetimeTogether, WhatWasGatheredAheadForNobodyIsReleased) {
  on_ranks(2, GetParam(), [](World, Chain& net, Engine& engine) {
    const int64_t one = layer_bytes(engine, 2);
    net.forward(ones).sum().backward();
    at::Tensor h = ones;
    for (int i : {0, 2, 4}) {
      h = torch::tanh(net.layers[i]->forward(h));
      EXPECT_LE(gathered(engine), 2 * one);
    }
    h.sum().backward();
    EXPECT_EQ(gathered(engine), 0);
    engine.step();
  });
}

TEST(Lifetime, RanksThatGatherDifferentUnitsByCollectivesAreToldBoth) {
  try {
    on_ranks(2, Gather::together, [](World world, Chain& net, Engine&) { net.layers[world.rank()]->forward(ones); });
    FAIL() << "different units were gathered";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("layer0."), testing::HasSubstr("layer1."),
                                             testing::HasSubstr("the same units on every rank")));
  }
}

// A window that holds everything: a step gathers every unit once, in one message, and lets go of all at its end.
TEST(Lifetime, AWideWindowKeepsWhatTheBackwardNeeds) {
  on_ranks(
      3, Gather::together,
      [](World world, Chain& net, Engine& engine) {
        Units& units = *engine.impl().units;
        const auto messages = [&] { return wire_counts(world)[static_cast<size_t>(Cargo::gather)].rounds; };
        for (int step = 0; step < 4; ++step) {
          const int64_t before = units.gathers(), sent = messages();
          net.forward(ones * (step + 1)).sum().backward();
          EXPECT_EQ(gathered(engine), 0);
          EXPECT_EQ(units.gathers() - before, step == 0 ? 10 : 5) << step;
          EXPECT_EQ(messages() - sent, step == 0 ? 10 : 1) << step;
          engine.step();
          engine.zero_grad();
        }
      },
      1 << 20);
}

// Two units and a half fit: whole at a time are these, and the one in use.
TEST_P(LifetimeTogether, AWindowBoundsWhatIsWhole) {
  int64_t one = 0;
  on_ranks(2, Gather::in_place, [&](World world, Chain&, Engine& engine) {
    if (world.rank() == 0) one = layer_bytes(engine, 2);
  });
  on_ranks(
      2, GetParam(),
      [&](World, Chain& net, Engine& engine) {
        std::vector<int64_t> seen;
        const auto look = [&](const at::Tensor& h) {
          seen.push_back(gathered(engine));
          if (h.requires_grad()) h.register_hook([&](const at::Tensor&) { seen.push_back(gathered(engine)); });
        };
        for (int step = 0; step < 4; ++step) {
          net.forward(ones, look).sum().backward();
          engine.step();
          engine.zero_grad();
        }
        EXPECT_EQ(seen.size(), 40u);
        EXPECT_THAT(seen, testing::Each(testing::Le(3 * one)));
        EXPECT_THAT(seen, testing::Contains(testing::Ge(2 * one)));
      },
      2 * one + one / 2);
}

// Whole, but not in use: nobody reads or writes it there.
TEST_P(LifetimeTogether, WhatIsKeptForLaterCannotBeTouchedMeanwhile) {
  on_ranks(
      2, GetParam(),
      [](World, Chain& net, Engine& engine) {
        net.forward(ones).sum().backward();
        at::Tensor y = net.forward(ones);
        EXPECT_GT(gathered(engine), 0);
        at::NoGradGuard no_grad;
        for (auto& layer : net.layers) {
          EXPECT_THAT([&] { layer.get()->weight.add_(1); },
                      testing::Throws<std::exception>(
                          testing::Property(&std::exception::what, testing::HasSubstr("its unit is released"))));
        }
      },
      1 << 20);
}

// The orders differ from the second step on, in units of one size, gathered ahead already.
TEST(Lifetime, RanksWhoseOrdersPartLaterAreToldBothToo) {
  for (const int64_t window : {kNextAlone, int64_t{1} << 20}) {
    try {
      on_ranks(
          2, Gather::together,
          [](World world, Chain& net, Engine& engine) {
            for (int step = 0; step < 6; ++step) {
              at::Tensor h = ones;
              for (int i = 0; i < 5; ++i) {
                const int layer = world.rank() == 1 && step > 0 && i > 1 ? 6 - i : i;
                h = torch::tanh(net.layers[layer]->forward(h));
              }
              h.sum().backward();
              engine.step();
              engine.zero_grad();
            }
          },
          window);
      FAIL() << "different orders were gathered";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  testing::AllOf(testing::HasSubstr("layer"), testing::HasSubstr("the same units on every rank")))
          << window;
    }
  }
}

// Units of one size, in messages that do not say what they gather: the facts find out, and no parameter is updated.
TEST(Lifetime, GathersThatMixedUnitsNeverReachAnOptimizer) {
  for (const bool late : {false, true}) {
    std::atomic<int> updates{0};
    try {
      on_ranks(2, Gather::together, [&](World world, Chain& net, Engine& engine) {
        engine.impl().reducer->fault = Fault::gather_unnamed;
        for (int step = 0; step < 4; ++step) {
          const bool other = world.rank() == 1 && step == (late ? 2 : 0);
          at::Tensor h = ones;
          for (int i : {0, other ? 2 : 1, other ? 1 : 2, 3, 4}) h = torch::tanh(net.layers[i]->forward(h));
          h.sum().backward();
          engine.step();
          ++updates;
          engine.zero_grad();
        }
      });
      FAIL() << "mixed units were used";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("the same units on every rank"));
      if (!late) {
        EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("rank 0 gathered the parameters beside 'layer1."),
                                                 testing::HasSubstr("rank 1 gathered the parameters beside 'layer2.")));
      }
    }
    EXPECT_EQ(updates.load(), late ? 4 : 0);
  }
}

// Whichever of several ranks it is that differs.
TEST(Lifetime, GathersThatDifferAreToldWithTheRankAndTheUnits) {
  for (const int who : {1, 2}) {
    std::string said = "nothing";
    try {
      on_ranks(3, Gather::together, [&](World world, Chain& net, Engine& engine) {
        engine.impl().reducer->fault = Fault::gather_unnamed;
        at::Tensor h = ones;
        for (int i : {0, 1, world.rank() == who ? 3 : 2}) h = torch::tanh(net.layers[i]->forward(h));
        h.sum().backward();
      });
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_THAT(said, testing::AllOf(testing::HasSubstr("rank 0 gathered the parameters beside 'layer2."),
                                     testing::HasSubstr("where rank " + std::to_string(who) + " gathered"),
                                     testing::HasSubstr("'layer3."), testing::HasSubstr("as gather 3 of this pass")));
  }
}

}  // namespace
}  // namespace plumb

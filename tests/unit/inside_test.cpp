// The operators of compiled graphs over sharded parameters, called as a graph calls them: plumb::gather and plumb::unit.
#include "unit/inside.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <deque>
#include <random>

#include "unit/support/chain.h"

namespace plumb {
namespace {

using namespace test;
using scenarios::Alike;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<at::Tensor> gather(const std::vector<at::Tensor>& parameters, int64_t use = 0) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plumb::gather", "")
                             .typed<std::vector<at::Tensor>(const std::vector<at::Tensor>&, int64_t)>();
  return op.call(parameters, use);
}

void unit(const std::vector<at::Tensor>& parameters) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("plumb::unit", "").typed<void(const std::vector<at::Tensor>&)>();
  op.call(parameters);
}

// Three units of odd sizes under zero3, and their whole values from before.
struct Sharded {
  Sharded(const World& world, Gather how, int64_t window = 1) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(7);
    net = std::make_unique<Alike>(3);
    lock.unlock();
    parameters = net->parameters();
    for (const at::Tensor& parameter : parameters) values.push_back(parameter.detach().clone());
    engine = std::make_unique<Engine>(world, *net, SGD{.lr = 0.1}, Options{.strategy = "zero3"});
    if (how == Gather::together) engine->impl().units->gather_together(window);
  }
  int64_t gathered() const { return engine->impl().units->gathered_bytes(); }
  int64_t gathers() const { return engine->impl().units->gathers(); }

  std::unique_ptr<Alike> net;
  std::vector<at::Tensor> parameters, values;
  std::unique_ptr<Engine> engine;
};

void everywhere(const std::function<void(const World&, Sharded&)>& body) {
  for (const Gather how : {Gather::in_place, Gather::together}) {
    for (const int ranks : {2, 3}) {
      run_local(ranks, [&](World world) {
        SCOPED_TRACE(c10::str(ranks, " ranks, gathered ", how == Gather::together ? "together" : "in place"));
        Sharded sharded(world, how);
        body(world, sharded);
      });
    }
  }
}

TEST(Inside, EveryParameterIsWholeInTheOrderItWasAskedFor) {
  everywhere([](const World&, Sharded& sharded) {
    std::vector<size_t> order = {5, 0, 3, 1, 4, 2, 0};  // across units, one of them twice
    std::vector<at::Tensor> asked;
    for (const size_t i : order) asked.push_back(sharded.parameters[i]);
    const at::Tensor plain = at::arange(6).view({2, 3}).t();
    asked.insert(asked.begin() + 2, plain);
    const auto whole = gather(asked);
    ASSERT_EQ(whole.size(), asked.size());
    EXPECT_TRUE(whole[2].equal(plain)) << "what is whole already";
    EXPECT_NE(whole[2].const_data_ptr(), plain.const_data_ptr()) << "and may be overwritten by the graph";
    for (size_t i = 0; i < order.size(); ++i) {
      const at::Tensor& found = whole[i < 2 ? i : i + 1];
      EXPECT_TRUE(found.equal(sharded.values[order[i]])) << i;
      EXPECT_EQ(found.strides(), sharded.values[order[i]].strides()) << i;
      EXPECT_FALSE(found.requires_grad());
    }
  });
}

// The graph's memory: as much as the units have, until the last tensor over it has gone, and never the engine's own.
TEST(Inside, TheMemoryIsTheGraphsAndGoesWithItsLastTensor) {
  everywhere([](const World&, Sharded& sharded) {
    Engine& engine = *sharded.engine;
    const int64_t one = engine.impl().reducer->buckets()[0].numel * 4;
    EXPECT_EQ(sharded.gathered(), 0);
    auto first = gather({sharded.parameters[0], sharded.parameters[1]});
    EXPECT_EQ(sharded.gathered(), one) << "two parameters of one unit are one memory";
    auto second = gather({sharded.parameters[2]});
    EXPECT_EQ(sharded.gathered(), 2 * one);
    EXPECT_EQ(sharded.gathers(), 2);
    EXPECT_THAT([&] { sharded.parameters[0].sum(); }, ThrowsMessage<std::exception>(HasSubstr("is released")))
        << "the parameter itself is not whole";
    first[0].fill_(99);  // as a graph reuses memory
    first.erase(first.begin());
    EXPECT_EQ(sharded.gathered(), 2 * one) << "the other one still lives";
    EXPECT_TRUE(first[0].equal(sharded.values[1]));
    first.clear();
    EXPECT_EQ(sharded.gathered(), one);
    second.clear();
    EXPECT_EQ(sharded.gathered(), 0);
    EXPECT_TRUE(engine.full_parameter(sharded.parameters[0]).equal(sharded.values[0]));
  });
}

TEST(Inside, WhatSomebodyElseHoldsIsCopied) {
  everywhere([](const World&, Sharded& sharded) {
    at::NoGradGuard no_grad;
    const auto scope = sharded.engine->gathered({sharded.parameters[0]});
    const int64_t before = sharded.gathered();
    {
      const auto whole = gather({sharded.parameters[0]});
      EXPECT_NE(whole[0].const_data_ptr(), sharded.parameters[0].const_data_ptr());
      EXPECT_EQ(sharded.gathered(), 2 * before);
      whole[0].fill_(99);
    }
    EXPECT_EQ(sharded.gathered(), before);
    EXPECT_TRUE(sharded.parameters[0].equal(sharded.values[0]));
  });
}

// Also by a node that is running, and by what was saved past the hooks: a graph writes into memory of its own.
TEST(Inside, WhatANodeIsReadingIsCopied) {
  struct Reads : torch::autograd::Function<Reads> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              const at::Tensor& weight) {
      context->save_for_backward({weight});
      return x.mm(weight.t());
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      const at::Tensor weight = context->get_saved_variables()[0];
      gather({weight})[0].fill_(99);
      return {gradients[0].mm(weight), at::Tensor()};
    }
  };
  everywhere([](const World&, Sharded& sharded) {
    const at::Tensor wanted = torch::ones({2, sharded.values[0].size(0)}).mm(sharded.values[0]);
    for (const bool hooks : {true, false}) {
      const at::Tensor x = torch::ones({2, 6}).requires_grad_();
      at::Tensor y;
      if (!hooks) at::SavedTensorDefaultHooks::disable("a test");
      {
        const UnitScope scope(unit::door_of(sharded.net->layers[0].ptr()));
        y = Reads::apply(x, sharded.parameters[0]);
      }
      if (!hooks) at::SavedTensorDefaultHooks::enable();
      y.sum().backward();
      EXPECT_TRUE(x.grad().allclose(wanted)) << hooks;
      EXPECT_EQ(sharded.gathered(), 0);
    }
  });
}

// A graph may go on while, and after, the step changes the parameters: it has what it asked for.
TEST(Inside, AStepLeavesTheGraphsMemoryAloneAndTheNextGatherIsNew) {
  everywhere([](const World& world, Sharded& sharded) {
    Engine& engine = *sharded.engine;
    const auto before = gather({sharded.parameters[0]});
    const at::Tensor x = torch::ones({2, 6}) * (world.rank() + 1);
    at::Tensor h = x;
    for (auto& layer : sharded.net->layers) h = layer->forward(h);
    h.sum().backward();
    const at::Tensor gradient = engine.full_gradient(sharded.parameters[0]);
    engine.step();
    EXPECT_TRUE(before[0].equal(sharded.values[0]));
    EXPECT_TRUE(gather({sharded.parameters[0]})[0].allclose(sharded.values[0] - 0.1 * gradient, 1e-5, 1e-6));
  });
}

TEST(Inside, AChangeThatWasLostIsToldToAGraphToo) {
  run_local(2, [](World world) {
    Sharded sharded(world, Gather::in_place);
    {
      at::NoGradGuard no_grad;
      sharded.net->layers[1]->weight.fill_(1);
    }
    EXPECT_THAT([&] { gather({sharded.parameters[0]}); }, ThrowsMessage<Error>(HasSubstr("changed through its unit")));
    EXPECT_TRUE(gather({sharded.parameters[0]})[0].equal(sharded.values[0])) << "told once";
  });
}

// Two engines of one process: each gathers its own.
TEST(Inside, ParametersOfTwoEnginesAreGatheredByTheirOwn) {
  run_local(2, [](World world) {
    Sharded one(world, Gather::in_place), other(world, Gather::together);
    const inside::Counts before = inside::counts();
    const auto whole = gather({other.parameters[2], one.parameters[2], other.parameters[3], one.parameters[0]});
    EXPECT_TRUE(whole[0].equal(other.values[2]) && whole[1].equal(one.values[2]));
    EXPECT_TRUE(whole[2].equal(other.values[3]) && whole[3].equal(one.values[0]));
    EXPECT_EQ(one.gathers(), 2);
    EXPECT_EQ(other.gathers(), 1);
    EXPECT_GE(inside::counts().gathers, before.gathers + 2) << "one call of each engine";
  });
}

// Rank 0 alone gathers, in place: nobody else has to take part, and nobody else counts.
TEST(Inside, TheProcessCountsGathersBytesAndTheMostOfThem) {
  std::barrier together(2);
  run_local(2, [&](World world) {
    const Sharded sharded(world, Gather::in_place);
    together.arrive_and_wait();
    if (world.rank() == 0) {
      const int64_t one = sharded.engine->impl().reducer->buckets()[0].numel * 4;
      inside::forget_most();
      const inside::Counts before = inside::counts();
      EXPECT_EQ(before.most_bytes, before.bytes);
      {
        const auto all = gather(sharded.parameters);
        EXPECT_EQ(inside::counts().bytes, before.bytes + 3 * one);
        EXPECT_EQ(inside::counts().gathers, before.gathers + 1);
      }
      const auto again = gather({sharded.parameters[4]});
      EXPECT_EQ(inside::counts().bytes, before.bytes + one);
      EXPECT_EQ(inside::counts().most_bytes, before.bytes + 3 * one);
      inside::forget_most();
      EXPECT_EQ(inside::counts().most_bytes, before.bytes + one);
    }
    together.arrive_and_wait();
  });
}

const inside::Counts at_start = inside::counts();  // before any test

TEST(Inside, NothingIsCountedBeforeTheFirstGraph) {
  EXPECT_EQ(at_start.gathers, 0);
  EXPECT_EQ(at_start.bytes, 0);
  EXPECT_EQ(at_start.most_bytes, 0);
  EXPECT_EQ(at_start.ahead, 0);
}

// Whatever comes and goes, of any size: the most is the largest sum there was, to the byte.
TEST(Inside, TheMostIsThatOfAnyRowOfSizes) {
  const auto of_engine = std::make_shared<std::atomic<int64_t>>(0);
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::deque<inside::Handed> handed;
    std::deque<int64_t> sizes;
    inside::forget_most();
    const int64_t before = inside::counts().bytes;
    int64_t sum = 0, most = 0;
    for (int turn = 0; turn < 12; ++turn) {
      if (random() % 3 == 0 && !sizes.empty()) {
        sum -= sizes.front();
        handed.pop_front();
        sizes.pop_front();
      } else {
        sizes.push_back(static_cast<int64_t>(random() % 4));
        handed.emplace_back(c10::DataPtr(), sizes.back(), of_engine);
        sum += sizes.back();
      }
      most = std::max(most, sum);
      ASSERT_EQ(*of_engine, sum) << seed;
      ASSERT_EQ(inside::counts().bytes, before + sum) << seed;
      ASSERT_EQ(inside::counts().most_bytes, before + most) << seed;
    }
  }
  EXPECT_EQ(*of_engine, 0);
}

// Inside of a backward, what was gathered for it is let go with it, also where the graph's own tensors live on.
TEST(Inside, ABackwardThatGathersEndsWithNothingGathered) {
  struct Regathers : torch::autograd::Function<Regathers> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              const at::Tensor& weight) {
      context->saved_data["weight"] = weight.detach();  // no memory of its own: a view of the released parameter
      return x.mm(gather({weight})[0].t());
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0].mm(gather({context->saved_data["weight"].toTensor()}, 1)[0]), at::Tensor()};
    }
  };
  everywhere([](const World&, Sharded& sharded) {
    const at::Tensor x = torch::ones({2, 6}).requires_grad_();
    Regathers::apply(x, sharded.parameters[0]).sum().backward();
    EXPECT_TRUE(x.grad().allclose(torch::ones({2, sharded.values[0].size(0)}).mm(sharded.values[0])));
    EXPECT_EQ(sharded.gathered(), 0);
  });
}

// plumb::unit only marks a place; a graph that still has it when it runs was compiled by a backend that gathers nothing.
TEST(Inside, AMarkThatNobodyReplacedIsAnErrorOnlyForShardedParameters) {
  run_local(2, [](World world) {
    const Sharded sharded(world, Gather::in_place);
    const at::Tensor plain = at::ones({2});
    unit({plain});
    unit({});
    EXPECT_THAT([&] { unit({plain, sharded.parameters[1]}); }, ThrowsMessage<Error>(HasSubstr("does not gather")));
  });
}

TEST(Inside, WhileAGraphIsTracedResultsHaveShapesAndNothingElse) {
  const at::Tensor odd = at::empty({4, 6}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16)).t();
  const auto traced = gather({odd, at::empty({}, at::kMeta)});
  ASSERT_EQ(traced.size(), 2U);
  EXPECT_TRUE(traced[0].is_meta());
  EXPECT_EQ(traced[0].sizes(), odd.sizes());
  EXPECT_EQ(traced[0].strides(), odd.strides());
  EXPECT_EQ(traced[0].scalar_type(), at::kBFloat16);
  EXPECT_EQ(traced[1].dim(), 0);
  unit({odd});
}

}  // namespace
}  // namespace plumb

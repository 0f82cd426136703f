// Units: gathered when somebody needs them, released otherwise, however a graph is walked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <thread>

#include "engine/impl.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"
#include "unit/storage.h"

namespace plumb {
namespace {

using scenarios::checkpoint;
using scenarios::Checkpoint;

// Unpacks what it saved, and throws once.
struct Explosive : torch::autograd::Function<Explosive> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t armed) {
    context->save_for_backward({x});
    context->saved_data["armed"] = armed;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    context->get_saved_variables();
    bool& armed = *reinterpret_cast<bool*>(context->saved_data["armed"].toInt());
    if (std::exchange(armed, false)) throw std::runtime_error("planned");
    return {gradients[0] * 2, at::Tensor()};
  }
};

// A block that may stash a weight raw, return an auxiliary output, or recompute itself.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x))); }
  at::Tensor explosive(const at::Tensor& x, bool& armed) {
    return down(Explosive::apply(up(x), reinterpret_cast<int64_t>(&armed)));
  }
  at::Tensor recomputed(const at::Tensor& x) {
    body = [this](const at::Tensor& h) { return forward(h); };
    return checkpoint(body, x);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  Checkpoint::Body body;
};
TORCH_MODULE(Block);

// A unit with a unit inside.
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(int64_t width) {
    inner = register_module("inner", Block(width));
    scale = register_parameter("scale", torch::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x * scale) * scale; }
  Unit<Block> inner{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Outer);

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(3);
    first = register_module("first", Block(6));
    second = register_module("second", Block(6));
    outer = register_module("outer", Outer(6));
    table = register_module("table", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    tied = register_module("tied", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    tied->weight = tied->register_parameter("same", table->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first->forward(x);
    h = second(h);
    h = outer->forward(h);
    return torch::linear(table->forward(h), tied->weight);
  }
  Unit<Block> first{nullptr}, second{nullptr};
  Unit<Outer> outer{nullptr};
  Unit<torch::nn::Linear> table{nullptr}, tied{nullptr};
};

int64_t gathered(const Engine& engine) { return engine.impl().units->gathered_bytes(); }

using Pattern = std::function<void(Net&, const at::Tensor& x, const std::function<void()>& nothing_gathered)>;

// Gradients of the same pattern on plain libtorch, one process, all ranks' inputs.
struct Named {
  const char* name;
  Pattern run;
};

const std::vector<Named>& patterns() {
  static const std::vector<Named> all = {
      {"TheSameLossTwice",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         check();
         loss.backward({}, true);
         check();
         loss.backward();
         check();
       }},
      {"TwoLossesOverOneForward",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.forward(x);
         auto one = y.pow(2).sum(), two = y.sin().sum();
         one.backward({}, true);
         check();
         two.backward();
         check();
       }},
      {"ZeroingBetween",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.forward(x);
         auto one = y.pow(2).sum(), two = y.sin().sum();
         one.backward({}, true);
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         check();
         two.backward();
       }},
      {"ThroughAnIntermediateTensor",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto h = net.first->forward(x);
         auto y = net.second->forward(h);
         h.backward(torch::ones_like(h), true);
         check();
         y.sum().backward();
       }},
      {"AnAuxiliaryOutput",
       [](Net& net, const at::Tensor& x, const auto& check) {
         at::Tensor aux;
         auto y = [&] {
           auto h = net.first->up(x);
           aux = h.pow(2).mean();
           return net.second->forward(net.first->down(torch::tanh(h)));
         }();
         aux.backward({}, true);
         check();
         y.pow(2).sum().backward();
       }},
      {"NestedUnitsTwice",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.outer->forward(net.outer->forward(x));
         y.pow(2).sum().backward({}, true);
         check();
         y.sum().backward();
       }},
      {"TiedUnits",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.tied->forward(torch::tanh(net.table->forward(x)));
         check();
         y.pow(2).sum().backward({}, true);
         y.sum().backward();
       }},
      {"CheckpointInsideAUnit",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         auto y = net.second->forward(net.first->recomputed(input));
         check();
         y.pow(2).sum().backward();
         check();
       }},
      {"CheckpointAsTheOnlyNode",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         auto y = net.first->recomputed(input);
         y.backward(torch::ones_like(y), true);
         check();
         y.backward(torch::ones_like(y));
       }},
      {"CheckpointAroundUnits",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         const Checkpoint::Body body = [&](const at::Tensor& h) { return net.second->forward(net.first->forward(h)); };
         checkpoint(body, input).pow(2).sum().backward();
         check();
       }},
      {"DoubleBackward",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto input = x.clone().requires_grad_();
         auto loss = net.forward(input).pow(2).sum();
         auto g = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
         check();
         (loss + g.pow(2).sum()).backward();
         check();
       }},
      {"AnExceptionInTheMiddleThenRetry",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto h = net.first->forward(x);
         auto handle = h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
         auto loss = net.second->forward(h).pow(2).sum();
         EXPECT_ANY_THROW(loss.backward({}, true));
         check();
         h.remove_hook(handle);
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         net.forward(x).sum().backward();
       }},
      {"AnExceptionInsideANodeThenRetry",
       [](Net& net, const at::Tensor& x, const auto& check) {
         bool armed = true;
         auto loss = net.first->explosive(net.second->forward(x), armed).pow(2).sum();
         EXPECT_ANY_THROW(loss.backward({}, true));
         check();
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         loss.backward();
       }},
      {"AnExceptionInForwardThenRetry",
       [](Net& net, const at::Tensor& x, const auto& check) {
         EXPECT_ANY_THROW(net.first->forward(x.narrow(1, 0, 3)));
         check();
         net.forward(x).sum().backward();
       }},
      {"InPlaceOnTheOutput",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto y = net.first->forward(x);
         y.mul_(2);
         auto z = net.second->forward(y);
         z.relu_();
         z.sum().backward();
         check();
       }},
      {"EvaluationBetween",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         {
           at::NoGradGuard no_grad;
           net.forward(x);
         }
         {
           c10::InferenceMode inference;
           net.forward(x.clone());
         }
         check();
         loss.backward();
       }},
      {"AutogradGradOnly",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         torch::autograd::grad({loss}, {net.first->up->weight}, {}, true);
         check();
         loss.backward();
       }},
      {"NamedInputs",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto loss = net.forward(x).pow(2).sum();
         loss.backward({}, true, false, std::vector<at::Tensor>{net.second->up->weight});
         check();
         loss.backward();
       }},
      {"OneUnitManyTimes",
       [](Net& net, const at::Tensor& x, const auto& check) {
         auto h = x;
         for (int i = 0; i < 4; ++i) h = net.first->forward(h);
         h.sum().backward({}, true);
         check();
         h.pow(2).sum().backward();
       }},
  };
  return all;
}

class UnitPatterns : public testing::TestWithParam<std::tuple<size_t, int>> {};

TEST_P(UnitPatterns, GiveTheGradientsOfOneProcessAndReleaseEverything) {
  const auto& [index, ranks] = GetParam();
  const Pattern& pattern = patterns()[index].run;
  auto input = [](int rank) {
    auto generator = at::detail::createCPUGenerator(100 + rank);
    return at::randn({3, 6}, generator);
  };
  Net reference;
  std::vector<at::Tensor> expected(reference.parameters().size());
  for (int rank = 0; rank < ranks; ++rank) {
    pattern(reference, input(rank), [] {});
    size_t i = 0;
    for (auto& p : reference.parameters()) {
      at::Tensor& sum = expected[i++];
      if (p.grad().defined()) sum = sum.defined() ? sum + p.grad() : p.grad().clone();
    }
    for (auto& p : reference.parameters()) p.mutable_grad().reset();
  }
  run_local(ranks, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.0}, {.strategy = "zero3"});
    auto nothing_gathered = [&] { EXPECT_EQ(gathered(engine), 0) << "rank " << world.rank(); };
    nothing_gathered();
    pattern(net, input(world.rank()), nothing_gathered);
    nothing_gathered();
    size_t i = 0;
    for (auto& p : net.parameters()) {
      const at::Tensor whole = engine.full_gradient(p);
      const at::Tensor& sum = expected[i++];
      ASSERT_EQ(whole.defined(), sum.defined());
      if (!whole.defined()) continue;
      EXPECT_TRUE(at::allclose(whole, sum / ranks, 1e-4, 1e-5)) << "parameter " << i - 1;
    }
    nothing_gathered();
  });
}

INSTANTIATE_TEST_SUITE_P(All, UnitPatterns,
                         testing::Combine(testing::Range<size_t>(0, patterns().size()), testing::Values(2, 3)),
                         [](const auto& info) {
                           return std::string(patterns()[std::get<0>(info.param)].name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

void on_two(const std::function<void(World, Net&, Engine&)>& body, const std::string& strategy = "zero3") {
  run_local(2, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
    body(world, net, engine);
  });
}

TEST(Units, KeepOnlyThisRanksShareOfTheParameters) {
  on_two([](World, Net& net, Engine& engine) {
    int64_t held = 0, whole = 0;
    for (const Bucket& bucket : engine.impl().reducer->buckets()) held += bucket.parameter.numel();
    for (const auto& p : net.parameters()) whole += p.numel();
    EXPECT_LE(held, whole / 2 + 200);
    EXPECT_EQ(net.first->up->weight.storage().nbytes() > 0, true);  // while the expression lasts
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Units, ABackwardHoldsFewUnitsAtATime) {
  on_two([](World, Net& net, Engine& engine) {
    std::vector<int64_t> seen;
    auto look = [&](const at::Tensor& tensor) {
      tensor.register_hook([&](const at::Tensor&) { seen.push_back(gathered(engine)); });
    };
    at::Tensor h = torch::ones({2, 6}).requires_grad_();
    look(h);
    const int64_t block = 4 * (6 * 12 + 12 + 12 * 6 + 6 + 3 * 16);  // f32, with room for padding
    for (int i = 0; i < 3; ++i) {
      h = net.first->forward(h);
      look(h);
      h = net.second->forward(h);
      look(h);
      EXPECT_EQ(gathered(engine), 0);
    }
    h.sum().backward();
    EXPECT_EQ(gathered(engine), 0);
    ASSERT_EQ(seen.size(), 7u);
    for (int64_t bytes : seen) EXPECT_LE(bytes, 2 * block);
  });
}

TEST(Units, SayWhatToDoWhenAReleasedParameterIsUsed) {
  if (!CanExplain<c10::StorageImpl>) GTEST_SKIP() << "this torch cannot take such a message back";
  on_two([](World, Net& net, Engine&) {
    const at::Tensor weight = net.first->up->weight;
    try {
      (weight + 1).sum().item<float>();
      FAIL() << "a released parameter was read";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("released"), testing::HasSubstr("first.")));
    }
  });
}

TEST(Units, FullParameterAndGatheredGiveWholeValues) {
  Net plain;
  on_two([&](World, Net& net, Engine& engine) {
    const auto whole = net.parameters();
    const auto expected = plain.parameters();
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(engine.full_parameter(whole[i]).equal(expected[i]));
    }
    const auto scope = engine.gathered(net.parameters());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(whole[i].detach().equal(expected[i]));
  });
}

TEST(Units, AWriteInsideAGatheredScopeIsRankZeros) {
  on_two([](World world, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    {
      at::NoGradGuard no_grad;
      const auto scope = engine.gathered({weight}, Access::write);
      weight.fill_(world.rank() == 0 ? 0.25 : 7.0);
    }
    EXPECT_TRUE(engine.full_parameter(weight).eq(0.25).all().item<bool>());
    EXPECT_TRUE(net.first->up->weight.detach().eq(0.25).all().item<bool>());
  });
}

TEST(Units, AChangeThatWouldBeLostIsAnError) {
  on_two([](World, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    EXPECT_THROW(
        {
          at::NoGradGuard no_grad;
          const auto scope = engine.gathered({weight});
          weight.fill_(1.0);
        },
        Error);
  });
}

TEST(Units, AStepInsideAScopeIsAnError) {
  on_two([](World, Net& net, Engine& engine) {
    const auto scope = engine.gathered(net.parameters());
    net.forward(torch::ones({1, 6})).sum().backward();
    EXPECT_THROW(engine.step(), Error);
  });
}

TEST(Units, ASavedParameterThatChangedIsAnErrorAsInPlainTorch) {
  on_two([](World, Net& net, Engine& engine) {
    auto loss = net.forward(torch::ones({1, 6})).pow(2).sum();
    loss.backward({}, true);
    engine.step();
    EXPECT_ANY_THROW(loss.backward());
    engine.zero_grad();
  });
}

TEST(Units, UnitsThatOneRankAloneUsesHangNobody) {
  on_two([](World world, Net& net, Engine& engine) {
    for (int step = 0; step < 3; ++step) {
      auto h = net.first->forward(torch::ones({1, 6}));
      if (world.rank() == step % 2) h = net.second->forward(net.outer->forward(h));
      h.sum().backward();
      engine.step();
      engine.zero_grad();
    }
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Units, NobodyReadsAShardThatAnotherRankHasNotUpdated) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    Options options{.strategy = "zero3"};
    // Asked in the middle of the update: rank 1 takes its time.
    options.groups = {{.match =
                           [&](const std::string& name) {
                             if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                             return name.ends_with("scale");
                           },
                       .lr = {},
                       .weight_decay = {}}};
    Engine engine(world, net, SGD{.lr = 0.5}, options);
    std::vector<at::Tensor> before;
    for (const auto& p : net.parameters()) before.push_back(engine.full_parameter(p));
    net.forward(torch::ones({1, 6})).sum().backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : net.parameters()) gradients.push_back(engine.full_gradient(p));
    engine.step();
    const auto parameters = net.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!gradients[i].defined()) continue;
      EXPECT_TRUE(at::allclose(engine.full_parameter(parameters[i]), before[i] - 0.5 * gradients[i], 1e-5, 1e-6));
    }
  });
}

TEST(Units, AModelWithoutUnitsStaysWholeAndIsStillRight) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(1);
    torch::nn::Linear plain(4, 3);
    lock.unlock();
    Engine engine(world, *plain, SGD{.lr = 0.1}, {.strategy = "zero3"});
    plain(torch::ones({2, 4})).sum().backward();
    engine.step();
    EXPECT_EQ(engine.impl().units, nullptr);
  });
}

TEST(Units, ParametersAreWholeAgainWhenTheEngineIsGone) {
  Net plain;
  run_local(2, [&](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    Net net;
    lock.unlock();
    {
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
    }
    EXPECT_TRUE(net.first->up->weight.equal(plain.first->up->weight));
    net.forward(torch::ones({1, 6})).sum().backward();
    EXPECT_TRUE(net.first->up->weight.grad().defined());
    world.barrier();
  });
}

TEST(Deferred, BuildsTheValuesOfAnUnshardedModelInParts) {
  Net plain;
  for (const char* strategy : {"ddp", "zero2", "zero3", "hsdp"}) {
    run_local(3, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      std::unique_ptr<Net> net;
      {
        Deferred deferred(world);
        net = std::make_unique<Net>();
        if (CanExplain<c10::StorageImpl>) {
          EXPECT_ANY_THROW((net->first->up->weight + 1).sum().item<float>());
        }
      }
      lock.unlock();
      Engine engine(world, *net, SGD{.lr = 0.1}, {.strategy = strategy});
      const auto parameters = net->parameters();
      const auto expected = plain.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(engine.full_parameter(parameters[i]).equal(expected[i])) << strategy << " " << i;
      }
      net->forward(torch::ones({1, 6})).sum().backward();
      engine.step();
    });
  }
}

TEST(Deferred, RanksThatSeedDifferentlyAreAnError) {
  try {
    run_local(2, [](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      torch::manual_seed(world.rank());
      Deferred deferred(world);
      Unit<torch::nn::Linear> linear(torch::nn::Linear(3, 4));
      lock.unlock();
      Engine engine(world, *linear.ptr(), SGD{.lr = 0.1}, {.strategy = "zero3"});
    });
    ADD_FAILURE() << "different values went through";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("seed the generator alike"));
  }
}

TEST(Deliver, IsAnOperatorToo) {
  on_two([](World, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    const auto deliver = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plumb::deliver", "")
                             .typed<void(at::Tensor, const at::Tensor&)>();
    const auto end = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::end_pass", "").typed<void(at::Tensor)>();
    deliver.call(weight, torch::full(weight.sizes(), 0.5));
    deliver.call(weight, torch::full(weight.sizes(), 0.25));
    end.call(weight);
    EXPECT_TRUE(engine.full_gradient(weight).eq(0.75).all().item<bool>());
    deliver.call(torch::empty({2}, at::kMeta), torch::empty({2}, at::kMeta));  // traced: nothing happens
    EXPECT_THROW(engine.deliver(weight, torch::ones({2})), Error);
    EXPECT_THROW(engine.deliver(torch::ones({2}), torch::ones({2})), Error);
    EXPECT_THROW(engine.end_pass(), Error);
  });
}

}  // namespace
}  // namespace plumb

// The values of units: how they are read, written and replaced, and which changes are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "errors.h"
#include "unit/storage.h"
#include "unit/support/net.h"
#include "watch/strike.h"

namespace plumb {
namespace {

using namespace test;

TEST(Units, AWriteOnOneRankAloneIsToldAsTheUsersCall) {
  const std::vector<std::pair<const char*, std::function<void(Net&, Engine&)>>> others = {
      {"called step()", [](Net&, Engine& engine) { engine.step(); }},
      {"is in backward", [](Net& net, Engine&) { net.forward(torch::ones({1, 6})).sum().backward(); }},
      {"engine.gathered({'second.up.weight'}, Access::write)",
       [](Net& net, Engine& engine) { const auto scope = engine.gathered({net.second->up->weight}, Access::write); }},
  };
  for (const char* strategy : {"ddp", "zero3"}) {
    for (const auto& [words, call] : others) {
      for (int writer : {0, 1}) {
        std::vector<std::string> told(2);
        on_two(
            [&](World world, Net& net, Engine& engine) {
              try {
                if (world.rank() == writer) {
                  const auto scope = engine.gathered({net.first->up->weight}, Access::write);
                } else {
                  call(net, engine);
                }
              } catch (const Error& error) {
                told[world.rank()] = error.what();
              }
            },
            strategy);
        EXPECT_THAT(told, testing::Each(testing::AllOf(
                              testing::HasSubstr("engine.gathered({'first.up.weight'}, Access::write)"),
                              testing::HasSubstr(words), testing::HasSubstr("rank 0"), testing::HasSubstr("rank 1"))));
      }
    }
  }
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
    const std::vector<std::pair<std::string, at::Tensor>> some = {{"first.up.weight", net.first->up->weight},
                                                                  {"first.up.bias", net.first->up->bias},
                                                                  {"first.down.bias", net.first->down->bias}};
    for (const auto& [name, changed] : some) {  // whichever of those that were gathered
      std::string said = "nothing";
      try {
        at::NoGradGuard no_grad;
        const auto scope = engine.gathered({some[0].second, some[1].second, some[2].second});
        changed.fill_(1.0);
      } catch (const Error& error) {
        said = error.what();
      }
      EXPECT_THAT(said, testing::HasSubstr("'" + name + "' was changed inside engine.gathered"));
    }
  });
}

// What a scope inside of another writes is nobody's loss; what comes after it, or lies beside it, is.
TEST(Units, AWriteInsideAScopeThatReadsIsNotLost) {
  on_two([](World world, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight, beside = net.first->up->bias;
    at::NoGradGuard no_grad;
    const auto program = [&](const std::function<void()>& after) {
      const auto reads = engine.gathered({weight, beside});
      {
        const auto writes = engine.gathered({weight}, Access::write);
        weight.fill_(world.rank() == 0 ? 0.25 : 7.0);
      }
      EXPECT_TRUE(weight.eq(0.25).all().item<bool>()) << "seen in the scope around it, too";
      after();
    };
    program([] {});
    EXPECT_TRUE(engine.full_parameter(weight).eq(0.25).all().item<bool>());
    for (const auto& [name, changed] : {std::pair{"first.up.weight", weight}, std::pair{"first.up.bias", beside}}) {
      const auto lost = [&] { program([&] { at::Tensor(changed).fill_(3); }); };
      EXPECT_THAT(lost, testing::ThrowsMessage<Error>(
                            testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("the change is lost"))));
    }
  });
}

TEST(Units, AChangeThroughAUnitIsAnErrorAtTheNextUse) {
  on_two([](World, Net& net, Engine& engine) {
    const auto each = net.first.get()->named_parameters();  // whichever of those of the unit
    for (const auto& item : each) {
      {
        at::NoGradGuard no_grad;
        const UnitScope scope(unit::door_of(net.first.ptr()));
        item.value().clamp_(-0.1, 0.1);
      }
      EXPECT_THAT([&] { engine.step(); },
                  testing::ThrowsMessage<Error>(testing::AllOf(testing::HasSubstr("first." + item.key()),
                                                               testing::HasSubstr("changed through its unit"))));
      engine.step();  // told once
    }
  });
}

// Any one of them, wherever it lies in its unit; those beside it go on as they were.
TEST(Units, AParameterGivenOtherMemoryComesHomeAtTheNextStep) {
  for (const char* strategy : {"ddp", "zero3"}) {
    for (size_t which = 0; which < Net().parameters().size(); ++which) {
      on_two(
          [&](World world, Net& net, Engine& engine) {
            const auto parameters = net.parameters();
            at::Tensor target = parameters[which];
            const at::Tensor other = at::linspace(-1, 1, target.numel()).view(target.sizes());
            std::vector<at::Tensor> values;
            for (const at::Tensor& parameter : parameters) {  // tied ones are one parameter by two names
              values.push_back(parameter.is_same(target) ? other : engine.full_parameter(parameter).clone());
            }
            target.set_data(other / 2);
            {
              at::NoGradGuard no_grad;
              target.mul_(2);  // where it lies now
            }
            net.forward(torch::ones({2, 6})).pow(2).sum().backward();
            std::vector<at::Tensor> gradients;
            for (const at::Tensor& parameter : parameters) gradients.push_back(engine.full_gradient(parameter));
            engine.step();
            for (size_t i = 0; i < parameters.size(); ++i) {
              const at::Tensor expected = gradients[i].defined() ? values[i] - 0.1 * gradients[i] : values[i];
              EXPECT_TRUE(
                  engine.full_parameter(parameters[i]).allclose(expected, 1e-5, 1e-6))  // a sum may nearly cancel
                  << strategy << ", rank " << world.rank() << ": " << i << " after a change of " << which;
            }
          },
          strategy);
    }
  }
}

struct Twins : torch::nn::Module {
  Twins() {
    for (const char* name : {"a", "b", "c"}) {
      weights.push_back(register_parameter(name, at::full({3, 3}, 1.0 + static_cast<double>(weights.size()))));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x.mm(weights[0]).mm(weights[1]).mm(weights[2]); }
  std::vector<at::Tensor> weights;
};

// That one's values are elsewhere while the unit is released: nothing is read where they were.
TEST(Units, AParameterGivenTheMemoryOfAnotherOfItsUnitIsAnErrorOrHasItsValues) {
  for (const int ranks : {1, 2}) {
    for (const bool inside : {false, true}) {
      for (const bool beside : {false, true}) {
        const auto texts = errors(ranks, [&](World world) {
          auto model = std::make_shared<torch::nn::Module>("model");
          Unit<Twins> twins(std::make_shared<Twins>());
          model->register_module("twins", twins.ptr());
          Engine engine(world, *model, SGD{.lr = 0.0}, {.strategy = "zero3"});
          auto& weights = twins.get()->weights;
          const auto change = [&] {
            if (beside) weights[0].set_data(at::full({3, 3}, 7.0));
            weights[1].set_data(weights[2]);
          };
          if (inside) {
            const auto scope = engine.gathered(weights, Access::write);
            change();
          } else {
            change();
          }
          engine.backward(twins(torch::ones({2, 3})).sum());
          engine.step();
          EXPECT_TRUE(engine.full_parameter(weights[0]).eq(beside ? 7 : 1).all().item<bool>());
          EXPECT_TRUE(engine.full_parameter(weights[1]).eq(3).all().item<bool>()) << engine.full_parameter(weights[1]);
        });
        if (inside || ranks == 1) {
          EXPECT_THAT(texts, testing::Each("none"));
        } else {
          EXPECT_THAT(texts,
                      testing::Each(testing::AllOf(testing::HasSubstr("parameter 'twins.c'"),
                                                   testing::HasSubstr("released"), testing::HasSubstr("gathered("))));
        }
      }
    }
  }
}

TEST(Units, OtherMemoryMustHoldTheSameOnEveryRank) {
  for (const bool both : {true, false}) {
    on_two([both](World world, Net& net, Engine& engine) {
      at::Tensor weight = net.first->up->weight;
      net.forward(torch::ones({2, 6})).pow(2).sum().backward();
      if (both || world.rank() == 1) weight.set_data(at::full(weight.sizes(), world.rank() * 1.0));
      EXPECT_THAT([&] { engine.step(); },
                  testing::ThrowsMessage<Error>(testing::AllOf(testing::HasSubstr("first.up.weight"),
                                                               testing::HasSubstr("other values on rank 1"))));
    });
  }
}

TEST(Units, WhatIsLoadedInsideAWritableScopeIsEverybodys) {
  on_two([](World world, Net& net, Engine& engine) {
    const at::Tensor weight = net.first->up->weight;
    {
      at::NoGradGuard no_grad;
      const auto scope = engine.gathered({weight}, Access::write);
      at::Tensor target = weight;
      target.set_data(at::full(weight.sizes(), world.rank() == 0 ? 0.5 : 3.0));
    }
    EXPECT_TRUE(engine.full_parameter(weight).eq(0.5).all().item<bool>());
    net.forward(torch::ones({1, 6})).sum().backward();
    engine.step();
    EXPECT_EQ(gathered(engine), 0);
  });
}

TEST(Units, AParameterOfAnotherDtypeOrShapeIsAnErrorAtTheNextStep) {
  for (const char* strategy : {"ddp", "zero2", "zero3"}) {
    for (const at::Tensor& other : {at::ones({12, 6}, at::kDouble), at::ones({3, 2}), at::ones({6, 12})}) {
      on_two(
          [&](World, Net& net, Engine& engine) {
            net.forward(torch::ones({1, 6})).sum().backward();
            engine.step();
            at::Tensor weight = net.first->up->weight;
            net.forward(torch::ones({1, 6})).sum().backward();
            weight.set_data(other.clone());
            EXPECT_THROW(engine.step(), std::exception);
          },
          strategy);
    }
  }
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

// A place for a module that comes later: used before, it is libtorch's own error.
TEST(Units, OneWithoutAModuleIsAnErrorWhenItIsUsed) {
  Unit<torch::nn::Linear> nothing{nullptr};
  EXPECT_THAT([&] { nothing(torch::ones({1, 2})); },
              testing::ThrowsMessage<c10::Error>(testing::HasSubstr("empty ModuleHolder")));
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

// Where ranks read each other's memory one can try again alone; whatever the failed use had taken before is free again.
TEST(Units, AGatherThatFailedHoldsNothing) {
  for (const char* number : {"1", "2", "3"}) {
    for (const bool forward : {false, true}) {
      const std::string fault = std::string("rank=1,point=gather:") + number + ",kind=throw";
      setenv("PLUMB_FAULT", fault.c_str(), 1);
      arm_strike();
      on_two([&](World world, Net& net, Engine& engine) {
        const at::Tensor x = torch::ones({2, 6});
        const auto use = [&] {
          if (forward) {
            (void)net.forward(x);
          } else {
            const auto scope = engine.gathered(net.parameters());
            EXPECT_FALSE(net.first->up->weight.detach().isnan().any().item<bool>());
          }
        };
        if (world.rank() == 1) {
          EXPECT_THAT(use, testing::ThrowsMessage<Error>(testing::HasSubstr("PLUMB_FAULT asked for an error")));
          EXPECT_EQ(gathered(engine), 0);
        }
        use();
        EXPECT_EQ(gathered(engine), 0);
        net.forward(x).sum().backward();
        engine.step();
        EXPECT_EQ(gathered(engine), 0);
      });
      unsetenv("PLUMB_FAULT");
      arm_strike();
    }
  }
}

}  // namespace
}  // namespace plumb

// What becomes of changes to parameters of units, and of uses while they are released.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "unit/support/chain.h"

namespace plumb {
namespace {

using namespace test;

TEST(UnitChanges, WhatIsWrittenThroughAUnitInsideAWriteScopeIsKept) {
  for (Gather how : {Gather::in_place, Gather::together}) {
    on_ranks(3, how, [](World world, Chain& net, Engine& engine) {
      const at::Tensor weight = net.layers[1]->weight, bias = net.layers[1]->bias;
      const at::Tensor before = engine.full_parameter(bias);
      {
        at::NoGradGuard no_grad;
        const auto scope = engine.gathered({weight}, Access::write);
        net.layers[1]->weight.fill_(world.rank() == 0 ? 0.5 : 9.0);
      }
      EXPECT_TRUE(engine.full_parameter(weight).eq(0.5).all().item<bool>());
      EXPECT_TRUE(engine.full_parameter(bias).equal(before));
      net.forward(ones).sum().backward();  // and is no loss
      engine.step();
      EXPECT_EQ(gathered(engine), 0);
    });
  }
}

// A graph that saved a parameter before it was written fails on every rank, also where nothing was written.
TEST(UnitChanges, AWriteIsSeenByGraphsThatSavedTheOldValue) {
  on_ranks(2, Gather::in_place, [](World world, Chain& net, Engine& engine) {
    auto x = ones.clone().requires_grad_();
    const at::Tensor y = net.forward(x);
    const at::Tensor weight = net.layers[1]->weight;
    {
      at::NoGradGuard no_grad;
      const auto scope = engine.gathered({weight}, Access::write);
      if (world.rank() == 0) weight.mul_(2);
    }
    EXPECT_THAT([&] { torch::autograd::grad({y.sum()}, {x}); },
                testing::Throws<std::exception>(
                    testing::Property(&std::exception::what, testing::HasSubstr("modified by an inplace operation"))));
    EXPECT_EQ(gathered(engine), 0);
  });
}

// As in one process: a backward that does not read what was written goes on, whatever lies beside it in its unit.
TEST(UnitChanges, AWriteLeavesGraphsAloneThatSavedWhatLiesBesideIt) {
  for (const char* strategy : {"ddp", "zero3"}) {
    on_two(
        [](World world, Net& net, Engine& engine) {
          const at::Tensor weight = net.first->up->weight, bias = net.first->up->bias;
          const at::Tensor y = net.first->forward(ones);
          y.sum().backward({}, /*retain_graph=*/true);
          const at::Tensor wanted = engine.full_gradient(weight).clone();
          engine.zero_grad();
          {
            at::NoGradGuard no_grad;
            const auto scope = engine.gathered({bias}, Access::write);
            bias.fill_(world.rank() == 0 ? 0.5 : 9.0);
          }
          y.sum().backward();
          EXPECT_TRUE(engine.full_gradient(weight).equal(wanted));
          EXPECT_TRUE(engine.full_parameter(bias).eq(0.5).all().item<bool>());
        },
        strategy);
  }
}

// All parameters at once, cut in all places.
TEST(UnitChanges, EveryParameterGivenOtherMemoryComesHomeInAllItsParts) {
  for (int ranks : {2, 3}) {
    for (bool inside : {false, true}) {
      on_ranks(ranks, Gather::in_place, [&](World, Chain& net, Engine& engine) {
        std::vector<at::Tensor> values;
        int64_t next = 0;
        for (const auto& p : net.parameters()) {
          values.push_back(at::arange(next, next + p.numel()).to(at::kFloat).view(p.sizes()));
          next += p.numel();
        }
        const auto give = [&] {
          for (size_t i = 0; i < values.size(); ++i) net.parameters()[i].set_data(values[i].clone());
        };
        if (inside) {
          const auto scope = engine.gathered(net.parameters(), Access::write);
          give();
        } else {
          give();
          engine.step();
        }
        EXPECT_EQ(gathered(engine), 0);
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_TRUE(engine.full_parameter(net.parameters()[i]).equal(values[i])) << i;
        }
      });
    }
  }
}

// Whose elements lie in another order than their shape's: they lie so again, and other memory in any order comes home by elements.
TEST(UnitChanges, AParameterThatLiesTurnedComesHomeTurned) {
  struct Turned : torch::nn::Module {
    Turned() {
      weight = register_parameter("weight", torch::arange(12, at::kFloat).view({4, 3}).t() / 7);
      bias = register_parameter("bias", torch::ones({3}));
    }
    at::Tensor forward(const at::Tensor& x) { return x.mm(weight) + bias.sum(); }
    at::Tensor weight, bias;
  };
  for (const Gather how : {Gather::in_place, Gather::together}) {
    for (const bool turned : {false, true}) {
      for (const bool inside : {false, true}) {
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(turned ? "turned" : "in order", inside ? ", inside" : ""));
          auto model = std::make_shared<torch::nn::Module>("model");
          Unit<Turned> unit(std::make_shared<Turned>());
          model->register_module("unit", unit.ptr());
          Engine engine(world, *model, SGD{.lr = 1}, {.strategy = "zero3"});
          if (how == Gather::together) engine.impl().units->gather_together(kNextAlone);
          at::Tensor weight = unit.get()->weight;
          const at::Tensor other = torch::arange(12, at::kFloat).view({3, 4}).sin();
          const at::Tensor given = turned ? other.t().contiguous().t() : other.clone();
          if (inside) {
            const auto scope = engine.gathered({weight}, Access::write);
            weight.set_data(given);
          } else {
            weight.set_data(given);
          }
          for (int step = 0; step < 2; ++step) {
            unit(torch::ones({1, 3})).sum().backward();
            engine.step();
            engine.zero_grad();
            EXPECT_TRUE(engine.full_parameter(weight).allclose(other - (step + 1)));
            const auto scope = engine.gathered({weight});
            EXPECT_TRUE(weight.allclose(other - (step + 1)));
            EXPECT_EQ(weight.strides(), at::IntArrayRef({1, 3}));
          }
        });
      }
    }
  }
}

TEST(UnitChanges, EveryUseOfAReleasedParameterIsAnErrorThatNamesIt) {
  on_ranks(2, Gather::in_place, [](World, Chain& net, Engine&) {
    net.forward(ones);
    for (const auto& item : net.named_parameters()) {
      const at::Tensor& p = item.value();
      const std::vector<std::function<void()>> uses = {
          [&] { at::Tensor sum = p + 1; }, [&] { torch::nn::utils::parameters_to_vector({p}); },
          [&] { p.detach().mul_(2); },     [&] { p.detach().clone(); },
          [&] { p.sum().item<float>(); },  [&] { at::_foreach_norm(std::vector<at::Tensor>{p.detach()}); },
          [&] { p.data_ptr<float>(); },
      };
      for (size_t i = 0; i < uses.size(); ++i) {
        try {
          uses[i]();
          ADD_FAILURE() << "use " << i << " of " << item.key() << " read memory that is not there";
        } catch (const std::exception& error) {
          const std::string text = error.what(), first_line = text.substr(0, text.find('\n'));
          EXPECT_THAT(first_line, testing::AllOf(testing::HasSubstr("'" + item.key() + "' was used while its unit is"),
                                                 testing::HasSubstr("engine.gathered")));
          EXPECT_THAT(text, testing::Not(testing::HasSubstr("frame #"))) << "libtorch's, which say nothing here";
        }
      }
    }
    EXPECT_THAT([] { at::ones({2}) + at::ones({3}); }, testing::Throws<std::exception>(testing::Property(
                                                           &std::exception::what, testing::HasSubstr("frame #"))))
        << "another error keeps its frames";
    net.forward(ones).sum().backward();  // and whole again when they should be
  });
}

}  // namespace
}  // namespace plumb

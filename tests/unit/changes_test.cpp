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

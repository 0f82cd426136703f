// Parameters that are written between steps: by scopes that gather them, and by a fault on purpose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include "engine/support/plain.h"
#include "unit/saved.h"
#include "watch/strike.h"

namespace plumb {
namespace {

using namespace test;
using testing::Each;

// What rank 0 wrote reaches nobody where the ranks write different parameters: all of them hear of it.
TEST(Gathered, WrittenByRanksThatDifferIsAnErrorOnEveryRank) {
  for (const std::string strategy : {"ddp", "zero3"}) {
    const auto texts = errors(2, [&](World world) {
      Parts model(4);
      Engine engine(world, model, SGD{}, {.strategy = strategy});
      const at::Tensor parameter = model.parameters()[world.rank() == 0 ? 0 : 2];
      try {
        const Gathered scope = engine.gathered({parameter}, Access::write);
        at::NoGradGuard no_grad;
        parameter.add_(1);
      } catch (...) {
        EXPECT_TRUE(saved::scopes().empty()) << "the scope has ended all the same: nothing is saved for it any more";
        throw;
      }
    });
    EXPECT_THAT(texts, Each(testing::Not("none"))) << strategy;
  }
}

// A scope that reads may have one inside that writes: what that one wrote is everybody's, and not lost.
TEST(Gathered, ToReadAroundOneThatWritesLosesNothing) {
  run_local(2, [](World world) {
    Parts model(4);
    Engine engine(world, model, SGD{}, {.strategy = "zero3"});
    const at::Tensor inside = model.parameters()[0], outside = model.parameters()[4];
    const at::Tensor before = engine.full_parameter(inside), other = engine.full_parameter(outside);
    {
      const Gathered around = engine.gathered({inside, outside});
      {
        const Gathered scope = engine.gathered({inside, outside}, Access::write);
        at::NoGradGuard no_grad;
        for (const at::Tensor& one : {inside, outside}) one.add_(world.rank() == 0 ? 1 : 5);
      }
      EXPECT_TRUE(inside.detach().equal(before + 1)) << world.rank();
    }
    EXPECT_TRUE(engine.full_parameter(inside).equal(before + 1)) << world.rank();
    EXPECT_TRUE(engine.full_parameter(outside).equal(other + 1)) << world.rank();
    // Left by an exception, a scope that wrote publishes nothing, and waits for nobody.
    try {
      const Gathered scope = engine.gathered({inside}, Access::write);
      at::NoGradGuard no_grad;
      inside.add_(7);
      throw std::logic_error("enough");
    } catch (const std::logic_error&) {
    }
    EXPECT_TRUE(engine.full_parameter(inside).equal(before + 1)) << world.rank();
  });
}

// A bit of the first parameter that this rank holds anything of, for trials of what notices it.
TEST(Struck, AStepFlipsABitOfAParameterThatHasElements) {
  setenv("PLUMB_FAULT", "rank=0,point=publish:2,kind=flip", 1);
  arm_strike();
  at::Tensor empty = at::zeros({0}).requires_grad_(), weight = at::ones({6}).requires_grad_();
  at::Tensor buffer = at::ones({3});
  Engine engine(World(), NamedTensors{{"empty", empty}, {"weight", weight}}, NamedTensors{{"buffer", buffer}},
                SGD{.lr = 1});
  for (int step = 0; step < 3; ++step) {
    weight.sum().backward();
    engine.step();
    engine.zero_grad();
    const int64_t wrong = weight.detach().ne(-static_cast<double>(step)).sum().item<int64_t>();
    EXPECT_EQ(wrong, step == 0 ? 0 : 1) << step;
  }
  EXPECT_TRUE(buffer.equal(at::ones({3})));
  unsetenv("PLUMB_FAULT");
  arm_strike();
}

}  // namespace
}  // namespace plumb

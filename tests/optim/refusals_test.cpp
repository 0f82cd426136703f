// Parameters that became something else between two steps.
#include <gtest/gtest.h>

#include <functional>

#include "plumb/plumb.h"

namespace plumb {
namespace {

// What became of a parameter since the engine was built: refused by name, on the rank that finds it, and the step can be
// taken once it is as it was.
TEST(Updater, RefusesAParameterThatBecameAnother) {
  run_local(2, [](World world) {
    struct Row {
      std::string words, strategy;
      std::function<at::Tensor(const at::Tensor&)> change;
    };
    const std::vector<Row> rows = {
        {"became Double", "ddp", [](const at::Tensor& was) { return was.to(at::kDouble); }},
        {"became Float [12]", "zero1", [](const at::Tensor& was) { return was.reshape(-1); }}};
    const at::Tensor start = at::arange(12, at::kFloat).view({3, 4});
    for (const Row& row : rows) {
      at::Tensor weight = start.clone().requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1}, {.strategy = row.strategy});
      const auto backward = [&] { (weight * start).sum().backward(); };
      backward();
      engine.step();
      engine.zero_grad();
      const at::Tensor was = weight.detach().clone();
      backward();
      weight.set_data(row.change(was));
      std::string said = "nothing";
      try {
        engine.step();
      } catch (const Error& error) {
        said = error.what();
      }
      EXPECT_NE(said.find(row.words), std::string::npos) << said;
      EXPECT_NE(said.find("'w'"), std::string::npos) << said;
      EXPECT_NE(said.find("rank " + std::to_string(world.rank()) + ":"), std::string::npos) << said;
      weight.set_data(was);
      engine.step();
      EXPECT_TRUE(weight.detach().equal(-start)) << row.words << weight;
    }
  });
}

// Memory in another order of the elements: gradients, state and the norm are of the same elements, whenever it was given.
TEST(Updater, BringsAParameterHomeFromMemoryOfAnotherOrder) {
  run_local(2, [](World world) {
    const at::Tensor start = at::arange(1, 13, at::kFloat).view({3, 4});
    for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
      for (const bool before_the_backward : {true, false}) {
        at::Tensor weight = start.clone().requires_grad_();
        Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1, .momentum = 0.5}, {.strategy = strategy});
        const auto backward = [&] { (weight * start).sum().backward(); };
        for (int step = 0; step < 3; ++step) {
          const at::Tensor turned = weight.detach().t().contiguous().t();
          if (before_the_backward) weight.set_data(turned);
          backward();
          if (!before_the_backward) weight.set_data(turned);
          EXPECT_TRUE(engine.full_gradient(weight).equal(start)) << strategy << step;
          EXPECT_NEAR(engine.grad_norm().item<double>(), start.norm().item<double>(), 1e-4) << strategy << step;
          engine.step();
          engine.zero_grad();
        }
        EXPECT_TRUE(weight.detach().equal(start * (1 - 1 - 1.5 - 1.75))) << strategy << weight;
        EXPECT_EQ(weight.strides(), start.strides());
      }
    }
  });
}

}  // namespace
}  // namespace plumb

// Parameters whose elements get another order in memory while an engine has them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "engine/impl.h"
#include "errors.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::Each;

struct LaidImpl : torch::nn::Module {
  explicit LaidImpl(at::ScalarType dtype) {
    const auto numbers = [&](at::IntArrayRef shape) {
      return at::arange(c10::multiply_integers(shape), at::kDouble).view(shape).sin().to(dtype);
    };
    image = register_parameter("image", numbers({4, 3, 2, 5}));
    matrix = register_parameter("matrix", numbers({5, 7}));
    row = register_parameter("row", numbers({3}));
  }
  at::Tensor forward(int rank, int step) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const at::Tensor& p : parameters()) {
      const at::Tensor each = at::arange(p.numel(), at::kDouble).view(p.sizes()).add(rank + 0.3 * step).cos();
      loss = loss + (p.to(at::kDouble) * each).sum();
    }
    return loss;
  }
  at::Tensor image, matrix, row;
};
TORCH_MODULE(Laid);

struct Holder : torch::nn::Module {
  explicit Holder(at::ScalarType dtype = at::kDouble) { laid = register_module("laid", Laid(dtype)); }
  Unit<Laid> laid{nullptr};
};

void give_another_order(LaidImpl& model) {
  model.image.set_data(model.image.detach().contiguous(at::MemoryFormat::ChannelsLast));
  model.matrix.set_data(model.matrix.detach().t().contiguous().t());
}

enum class When { before_the_first, after_the_first_backward, between_steps, after_a_later_backward };

struct Case {
  const char* strategy;
  When when;
  bool lets_go;  // cleared gradients keep no memory
  at::ScalarType dtype;
};

// "right", or what was said; the same on every rank.
std::vector<std::string> outcomes(const Case& one) {
  std::vector<std::string> found(2);
  const auto said = test::errors(2, [&](World world) {
    const double most = one.dtype == at::kDouble ? 1e-9 : 1e-5;
    Holder model(one.dtype), twin(one.dtype);
    Engine engine(world, model, SGD{.lr = 0.1, .momentum = 0.9}, {.strategy = one.strategy});
    if (one.lets_go) engine.impl().reducer->layout().small = 0;
    torch::optim::SGD optimizer(twin.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const bool sharded = engine.impl().units != nullptr;
    const auto change = [&] {
      give_another_order(*twin.laid.get());
      if (sharded) {
        const auto scope = engine.gathered(model.parameters(), Access::write);
        give_another_order(*model.laid.get());
      } else {
        give_another_order(*model.laid.get());
      }
    };
    for (int step = 0; step < 4; ++step) {
      if ((step == 0 && one.when == When::before_the_first) || (step == 2 && one.when == When::between_steps)) change();
      for (int rank = 0; rank < 2; ++rank) (twin.laid->forward(rank, step) / 2).backward();
      model.laid->forward(world.rank(), step).backward();
      if ((step == 0 && one.when == When::after_the_first_backward) ||
          (step == 2 && one.when == When::after_a_later_backward)) {
        change();
      }
      const auto trained = model.parameters(), reference = twin.parameters();
      for (size_t i = 0; i < trained.size(); ++i) {
        EXPECT_TRUE(engine.full_gradient(trained[i]).allclose(reference[i].grad(), most, most)) << i;
      }
      engine.step();
      engine.zero_grad();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto mine = model.parameters(), wanted = twin.parameters();
    std::string& text = found[world.rank()];
    for (size_t i = 0; i < mine.size(); ++i) {
      if (!engine.full_parameter(mine[i]).allclose(wanted[i].detach(), most, most)) text += c10::str("wrong: ", i, " ");
    }
    if (text.empty()) text = "right";
  });
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (said[rank] != "none") found[rank] = said[rank];
  }
  return found;
}

// Gradients and state lie in the order that the parameter had when its engine was built, and so does it from the next step on.
TEST(MemoryFormat, MayChangeAtAnyTime) {
  using enum When;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    for (const When when : {before_the_first, after_the_first_backward, between_steps, after_a_later_backward}) {
      for (const bool lets_go : {false, true}) {
        for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
          SCOPED_TRACE(c10::str(strategy, ", ", static_cast<int>(when), lets_go ? ", let go, " : ", ", dtype));
          EXPECT_THAT(outcomes({strategy, when, lets_go, dtype}), Each("right"));
        }
      }
    }
  }
}

// Over two backwards of one step: the first one's gradients come in another order than the second's.
TEST(MemoryFormat, MayChangeBetweenTwoBackwards) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    run_local(2, [&](World world) {
      Holder model, twin;
      Engine engine(world, model, SGD{.lr = 0.1}, {.strategy = strategy});
      for (int step = 0; step < 2; ++step) {
        if (step == 1) give_another_order(*model.laid.get());
        model.laid->forward(world.rank(), step).backward();
        for (int rank = 0; rank < 2; ++rank) (twin.laid->forward(rank, step) / 2).backward();
      }
      const auto trained = model.parameters(), reference = twin.parameters();
      for (size_t i = 0; i < trained.size(); ++i) {
        EXPECT_TRUE(engine.full_gradient(trained[i]).allclose(reference[i].grad(), 1e-9, 1e-9)) << strategy << i;
      }
    });
  }
}

}  // namespace
}  // namespace plumb

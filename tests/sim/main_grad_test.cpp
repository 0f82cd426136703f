// An owner without an engine, on several streams: what a fused module writes is there for hooks, readers and other writers.
#include "libtorch.h"

#include "grad/node.h"
#include "plumb/nn.h"
#include "plumb/plumb.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

enum class Hears { nothing, stand_in };

struct Written {
  Written(bool delayed, Hears hears)
      : linear(nn::LinearOptions{.in = 4, .out = 3, .bias = false, .delay_wgrad_compute = delayed}) {
    linear->to(device(0));
    MainGrad facts{.main_grad = at::zeros({3, 4}, on(0))};
    if (hears == Hears::stand_in) facts.grad_added_to_main_grad = false;
    name(facts.main_grad, "main_grad");
    sink = attach_main_grad(linear->weight, facts, "w");
    // The accumulator, and with it its hooks, belong to the stream that is current here.
    accumulator = torch::autograd::impl::grad_accumulator(linear->weight);
    accumulator->add_post_hook(std::make_unique<PostHook>([this](const at::Tensor&) {
      const Scope scope("a hook");
      hooked = sink->facts.main_grad.clone();
    }));
  }
  nn::Linear linear;
  std::shared_ptr<MainGradSink> sink;
  NodePtr accumulator;
  at::Tensor hooked;
};

class MainGradOnStreams : public testing::TestWithParam<Hears> {};
INSTANTIATE_TEST_SUITE_P(Table, MainGradOnStreams, testing::Values(Hears::nothing, Hears::stand_in),
                         [](const auto& info) { return info.param == Hears::nothing ? "Nothing" : "StandIn"; });

TEST_P(MainGradOnStreams, IsWrittenBeforeHooksAndReaders) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    Written one(false, GetParam());
    const auto home = current_stream(0), side = new_stream(0, "side");
    const at::Tensor x = at::ones({2, 4}, on(0));
    wait_for(side, home);
    const at::Tensor y = with(side, [&] { return one.linear->forward(x); });
    wait_for(home, side);
    y.sum().backward();
    const Scope scope("the reader");
    const at::Tensor read = one.sink->facts.main_grad.clone();
    session.finish();
    EXPECT_TRUE(session.races().empty()) << session.report();
    EXPECT_TRUE(read.cpu().eq(2).all().item<bool>()) << "seed " << seed;
    EXPECT_TRUE(one.hooked.cpu().eq(2).all().item<bool>()) << "seed " << seed;
  }
}

TEST_P(MainGradOnStreams, IsWrittenByOneStreamAfterAnother) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    Written one(false, GetParam());
    const auto home = current_stream(0);
    const at::Tensor x = at::ones({2, 4}, on(0));
    at::Tensor sum;
    for (const char* const called : {"left", "right"}) {
      const auto side = new_stream(0, called);
      wait_for(side, home);
      const at::Tensor y = with(side, [&] { return one.linear->forward(x); });
      wait_for(home, side);
      sum = sum.defined() ? sum + y.sum() : y.sum();
    }
    sum.backward();
    const at::Tensor read = one.sink->facts.main_grad.clone();
    session.finish();
    EXPECT_TRUE(session.races().empty()) << session.report();
    EXPECT_TRUE(read.cpu().eq(4).all().item<bool>()) << "seed " << seed;
  }
}

// backward_dw() on a stream of its own: after what it is computed from, which stays until it has run.
TEST_P(MainGradOnStreams, OfADelayedGradientIsMadeFromWhatTheBackwardLeft) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    Written one(true, GetParam());
    const auto home = current_stream(0), side = new_stream(0, "side"), later = new_stream(0, "later");
    wait_for(side, home);
    wait_for(later, home);  // knows main_grad, and nothing of the backward
    with(side, [&] {
      const at::Tensor x = at::ones({2, 4}, on(0));
      (one.linear->forward(x) * 3).sum().backward();
    });
    const at::Tensor read = with(later, [&] {
      one.linear->backward_dw();
      return one.sink->facts.main_grad.clone();
    });
    with(side, [&] {
      for (int i = 0; i < 3; ++i) (void)at::full({2, 4}, 7.0, on(0));  // takes what was freed
      for (int i = 0; i < 3; ++i) (void)at::full({2, 3}, 7.0, on(0));
    });
    session.finish();
    EXPECT_TRUE(session.races().empty()) << session.report();
    EXPECT_TRUE(read.cpu().eq(6).all().item<bool>()) << "seed " << seed;
  }
}

// A delayed gradient costs one reduction inside a Pass, and outside of one no more than its own bucket's second.
TEST(DelayedGradients, AreReducedOnceInsideAPass) {
  enum class Way { plain, pass, after };
  const auto collectives = [](Way way) {
    Session session(3);
    run_world(2, [&](World world) {
      torch::nn::Sequential model;
      std::vector<nn::Linear> layers;
      for (int i = 0; i < 4; ++i) {
        layers.emplace_back(
            nn::LinearOptions{.in = 8, .out = 8, .bias = true, .delay_wgrad_compute = way != Way::plain && i == 1});
        model->push_back(layers.back());
      }
      model->to(device(world.rank()));
      Engine engine(world, *model, SGD{.lr = 0.1}, {.bucket_bytes = 256, .first_bucket_bytes = 256});
      for (int step = 0; step < 3; ++step) {
        std::optional<Pass> pass;
        if (way == Way::pass) pass.emplace(engine);
        model->forward(at::ones({2, 8}, on(world.rank()))).sum().backward();
        if (way != Way::plain) layers[1]->backward_dw();
        pass.reset();
        engine.step();
        engine.zero_grad();
      }
    });
    EXPECT_TRUE(session.races().empty()) << session.report();
    return session.statistics().collectives;
  };
  const auto plain = collectives(Way::plain);
  EXPECT_EQ(collectives(Way::pass), plain);
  EXPECT_EQ(collectives(Way::after), plain + 3 * 2) << "one bucket more in each of three steps, counted on two ranks";
}

}  // namespace
}  // namespace plumb::sim

// An owner without an engine, on several streams: what a fused module writes is there for hooks, readers and other writers.
#include "libtorch.h"

#include "grad/node.h"
#include "nn/groups.h"
#include "nn/product.h"
#include "nn/wgrad.h"
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

// All that a weight gradient is computed from may be let go at once, though the stream that computes it is behind.
TEST(DelayedGradients, KeepWhatTheyReadForTheStreamThatReadsIt) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    for (const bool grouped : {false, true}) {
      Session session(seed);
      const auto later = new_stream(0, "later");
      std::vector<const void*> read;
      bool ran = false;
      {
        const at::Tensor weight = (grouped ? at::zeros({2, 3, 4}, on(0)) : at::zeros({3, 4}, on(0))).requires_grad_();
        const at::Tensor dy = at::ones({5, 3}, on(0)), x = at::ones({5, 4}, on(0));
        std::shared_ptr<const nn::Groups> groups;
        if (grouped) {
          groups =
              std::make_shared<const nn::Groups>(nn::Tokens::sizes(at::tensor({2, 3}, at::kLong)), 2, 5, device(0));
        }
        for (const at::Tensor& one : {dy, x}) read.push_back(one.const_data_ptr());
        if (grouped) read.push_back(groups->ends().const_data_ptr());
        nn::WgradJob job(dy, x, groups,
                         {{nn::Weight{.leaf = weight, .wanted = true},
                           nn::Like(weight),
                           {.into_buffer = false, .when = nn::When::delayed, .returned = nn::Returned::nothing}}});
        job.put_off();
        with(later, [&] {
          const auto made = job.run(nn::When::delayed);
          launch("a slow reader", {made[0]}, {}, [&](const Tensors&, const Tensors&) { ran = true; });
        });
      }
      std::vector<at::Tensor> fresh;
      for (int i = 0; i < 8; ++i) {
        fresh.push_back(at::empty({4}, on(0)));
        for (size_t of = 0; of < read.size(); ++of) {
          EXPECT_TRUE(ran || fresh.back().const_data_ptr() != read[of])
              << "input " << of << (grouped ? ", grouped" : "") << ", seed " << seed;
        }
      }
      session.finish();
      EXPECT_TRUE(session.races().empty()) << session.report();
    }
  }
}

// In one block, as the grouped product of a device takes them, whichever way they came there.
TEST(SeparateExperts, LieSideBySideOnTheDeviceTheyWereMovedTo) {
  for (const bool cast : {false, true}) {
    Session session(1);
    nn::GroupedLinear layer(
        nn::GroupedLinearOptions{.experts = 3, .in = 8, .out = 4, .weights = nn::Experts::separate});
    const at::Tensor before = at::stack(layer->weights);
    cast ? layer->to(device(0), at::kDouble) : layer->to(device(0));
    const at::Tensor block = nn::one_over(layer->weights);
    ASSERT_TRUE(block.defined()) << cast;
    EXPECT_TRUE(block.device() == device(0) && block.cpu().equal(before.to(block.scalar_type())));
  }
}

// Whoever reads batches ahead refills one buffer of counts as soon as the forward has returned.
TEST(TokenCounts, AreTheCallersAgainOnceTheForwardHasReturned) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    for (const at::ScalarType dtype : {at::kInt, at::kLong, at::kShort}) {
      for (const bool ends : {false, true}) {
        Session session(seed);
        nn::GroupedLinear layer(nn::GroupedLinearOptions{.experts = 2, .in = 4, .out = 3});
        layer->to(device(0));
        const at::Tensor counts =
            at::tensor(ends ? std::vector<int64_t>{2, 5} : std::vector<int64_t>{2, 3}).to(dtype).pin_memory();
        layer->forward(at::ones({5, 4}, on(0)), ends ? nn::Tokens::ends(counts) : nn::Tokens::sizes(counts));
        counts.fill_(9);
        for (const at::Tensor& given : {counts, counts.to(device(0))}) {
          const at::Tensor rows = given.fill_(ends ? 5 : 0);
          rows[1] = 5;
          const nn::Groups groups(ends ? nn::Tokens::ends(rows) : nn::Tokens::sizes(rows), 2, 5, device(0));
          EXPECT_FALSE(groups.ends().is_alias_of(rows)) << "a backward would read them after a refill";
        }
        session.finish();
        EXPECT_TRUE(session.races().empty()) << session.report();
      }
    }
  }
}

}  // namespace
}  // namespace plumb::sim

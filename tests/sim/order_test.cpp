// What the engine and its fused modules order, and what they leave alone: events are counted, and captures refused.
#include <map>
#include <set>

#include "grad/node.h"
#include "lane/lane.h"
#include "nn/ops.h"
#include "plumb/plumb.h"
#include "plumb/strategy.h"
#include "sim/actor.h"
#include "sim/scenarios.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

class Events : public testing::TestWithParam<std::string> {
 protected:
  // The events and waits that each part of a program made on all ranks, collectives apart.
  using Parts = std::vector<std::function<void(Actor&)>>;
  static std::vector<uint64_t> count(const Scenario& scenario, const std::string& strategy, const Parts& parts) {
    const Session session(1);
    std::vector<uint64_t> counts;
    run_world(ranks_for(strategy), [&](World world) {
      Actor actor(scenario, world, strategy, device(world.rank()));
      for (const auto& part : parts) {
        world.barrier();
        const uint64_t before = statistics().events + statistics().stream_waits;
        world.barrier();
        part(actor);
        world.barrier();
        if (world.rank() == 0) counts.push_back(statistics().events + statistics().stream_waits - before);
      }
    });
    return counts;
  }
};

TEST_P(Events, AreNotRecordedByAProgramOfOneStream) {
  Scenario scenario{"", "one-stream", "", {}, AdamW{.lr = 1e-2}, {}};
  scenario.options.bucket_bytes = 800;
  scenario.options.first_bucket_bytes = 256;
  scenario.options.clip_norm = 0.05;
  const auto step = [](Actor& actor) {
    Net& net = actor.net();
    actor.loss(actor.input(1)).backward();
    {
      const NoSync held = actor.engine().no_sync();
      net.left->fused(actor.input(2)).square().mean().backward();
    }
    const auto store = std::make_shared<nn::WgradStore>();
    (net.left->fused(actor.input(3), store) + net.left->fused(actor.input(4))).square().mean().backward();
    store->flush();
    const at::Tensor weight = net.right.get()->weight;
    for (int i = 0; i < 2; ++i) actor.engine().deliver(weight, actor.raw_gradient(weight, i));
    actor.engine().end_pass();
    (void)actor.engine().step();
    actor.engine().zero_grad();
  };
  const auto build = [](Actor& actor) { actor.build(); };
  EXPECT_EQ(count(scenario, GetParam(), {build, step, step, step}), (std::vector<uint64_t>{0, 0, 0, 0}));
}

// Streams that took part once are waited for, and then forgotten.
TEST_P(Events, EndWithTheStreamsThatNeededThem) {
  Scenario scenario{"", "streams-once", "", {}, AdamW{.lr = 1e-2}, {}};
  scenario.options.bucket_bytes = 800;
  scenario.options.first_bucket_bytes = 256;
  const auto build = [](Actor& actor) { actor.build({1, 2, 3, 0}); };
  const auto many = [](Actor& actor) {
    const at::Tensor loss = actor.branched_loss(actor.input(0), 1, 2);
    actor.wait(3, 0);
    actor.on(3, [&] { loss.backward(); });
    actor.on(1, [&] { (void)actor.engine().step(); });
    actor.wait(0, 1);
    actor.engine().zero_grad();
  };
  const auto one = [](Actor& actor) {
    actor.loss(actor.input(1)).backward();
    (void)actor.engine().step();
    actor.engine().zero_grad();
  };
  const std::vector<uint64_t> counts = count(scenario, GetParam(), {build, many, one, one, one});
  EXPECT_GT(counts[1], 0u);
  EXPECT_EQ(counts[3], 0u) << "the first step of one stream has waited for all others";
  EXPECT_EQ(counts[4], 0u);
}

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) names.push_back(row.name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(Table, Events, testing::ValuesIn(strategy_names()),
                         [](const auto& info) { return info.param; });

// Nothing is returned to autograd, which then has nothing to wait for.
TEST(FusedWeight, IsWrittenBeforeHooksAndReadersLook) {
  for (const bool stands_in : {false, true}) {
    Session session(1);
    const c10::Stream home = current_stream(0), side = new_stream(0, "side");
    const at::Tensor weight = at::ones({3, 4}, on(0)).set_requires_grad(true);
    MainGrad facts{.main_grad = at::zeros({3, 4}, on(0))};
    if (stands_in) facts.grad_added_to_main_grad = false;
    const auto sink = attach_main_grad(weight, facts);
    const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
    at::Tensor seen;
    accumulator->add_post_hook(
        std::make_unique<PostHook>([&](const at::Tensor&) { seen = sink->facts.main_grad.sum(); }));
    wait_for(side, home);
    at::Tensor loss = with(side, [&] { return nn::linear(at::ones({2, 4}, on(0)), weight, {}, nullptr).sum(); });
    wait_for(home, side);
    loss.record_stream(home);
    loss.backward();
    const at::Tensor read = sink->facts.main_grad.sum();
    session.finish();
    EXPECT_EQ(session.report(), "no races\n");
    EXPECT_EQ(seen.item<float>(), 24);
    EXPECT_EQ(read.item<float>(), 24);
  }
}

// ---- A backward that is captured without its step. The simulated device cannot capture; the test says that it does, and
// what a replay would write is written at once.

bool captures = false;

class CapturedBackward : public testing::Test {
 protected:
  void SetUp() override {
    ask_about_graphs([](const c10::Stream&) -> uint64_t { return captures ? 1 : 0; });
    model = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    model->to(device(0));
  }
  void TearDown() override {
    captures = false;
    ask_about_graphs(nullptr);
  }

  Engine engine(Optimizer optimizer = SGD{.lr = 0.1}) {
    Options options;
    options.bucket_bytes = options.first_bucket_bytes = 1;  // a bucket each
    return Engine(World(), *model, std::move(optimizer), options);
  }
  void backward(int layers = 2) {
    at::Tensor y = at::ones({2, 4}, on(0));
    for (int i = 0; i < layers; ++i) y = model[i]->as<torch::nn::Linear>()->forward(y);
    y.square().mean().backward();
  }
  void captured(int layers = 2) {
    captures = true;
    backward(layers);
    captures = false;
  }
  static std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      captures = false;
      return error.what();
    }
    return "no error";
  }

  Session session{1};
  torch::nn::Sequential model{nullptr};
};

TEST_F(CapturedBackward, IsRefusedBeforeTheFirstStep) {
  Engine engine = this->engine();
  EXPECT_THAT(error_of([&] { captured(); }), testing::HasSubstr("captured into a graph before the first step"));
  backward();
  (void)engine.step();
  EXPECT_EQ(error_of([&] { captured(); }), "no error");
}

TEST_F(CapturedBackward, IsSteppedAsOftenAsItIsReplayedWhileItsGradientsStay) {
  Engine engine = this->engine();
  backward();
  (void)engine.step();
  engine.zero_grad();
  captured();
  for (int replay = 0; replay < 3; ++replay) {
    const at::Tensor before = model->parameters()[0].detach().clone();
    (void)engine.step();
    EXPECT_FALSE(before.equal(model->parameters()[0])) << replay;
  }
  engine.zero_grad();
  EXPECT_THAT(error_of([&] { (void)engine.step(); }), testing::HasSubstr("do not call zero_grad() between a replay"));
  backward();  // and on without the graph
  EXPECT_EQ(error_of([&] { (void)engine.step(); }), "no error");
}

TEST_F(CapturedBackward, IsRefusedForParametersThatStillMove) {
  Engine engine = this->engine();
  backward(1);
  (void)engine.step();
  engine.zero_grad();
  captured(2);
  EXPECT_THAT(error_of([&] { (void)engine.step(); }),
              testing::HasSubstr("before the memory of its parameters was laid"));
}

TEST_F(CapturedBackward, LetsParametersItDoesNotReachMoveLater) {
  Engine engine = this->engine();
  backward(1);
  (void)engine.step();
  engine.zero_grad();
  captured(1);
  (void)engine.step();
  backward(2);
  EXPECT_EQ(error_of([&] { (void)engine.step(); }), "no error");
}

TEST_F(CapturedBackward, KeepsGradientsWhereTheyAre) {
  Engine engine = this->engine();
  {
    const NoSync held = engine.no_sync();  // the buckets are not in their final order yet
    backward();
  }
  (void)engine.step();
  const auto places = [&] {
    std::vector<const void*> where;
    for (const auto& parameter : model->parameters()) where.push_back(parameter.grad().const_data_ptr());
    return where;
  };
  const std::vector<const void*> before = places();
  engine.zero_grad();
  captured();
  EXPECT_EQ(places(), before);
  (void)engine.step();
  engine.zero_grad();
  backward();
  EXPECT_EQ(places(), before);
  const at::Tensor kept = model->parameters()[0].grad();
  engine.zero_grad();
  EXPECT_THAT(error_of([&] { backward(); }), testing::HasSubstr("must move, and a graph was captured"));
}

}  // namespace
}  // namespace plumb::sim

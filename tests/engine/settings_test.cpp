// What ranks set differently is an error on every rank that names the setting and both values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

at::Tensor leaf(int64_t size = 4) { return at::zeros({size}).requires_grad_(); }

// Every rank's error of engines that are built with `change` made on rank 2 only.
std::vector<std::string> built(Optimizer optimizer, const std::function<void(Optimizer&, Options&)>& change,
                               Options options = {}) {
  return errors(3, [&](World world) {
    Optimizer own = optimizer;
    Options settings = options;
    if (world.rank() == 2) change(own, settings);
    Engine engine(world, NamedTensors{{"a", leaf()}, {"b", leaf()}}, {}, own, settings);
  });
}

void names(const std::vector<std::string>& texts, const std::string& here, const std::string& there) {
  EXPECT_THAT(texts, Each(AllOf(HasSubstr(here + " on rank 2"), HasSubstr(there + " on rank 0"))));
}

template <class O>
void names_value(const std::string& name, double O::* field, const O& base = {}) {
  const double value = base.*field;
  const auto texts = built(base, [&](Optimizer& own, Options&) { std::get<O>(own).*field = value * 0.5 + 0.015625; });
  const auto shown = [](double number) {
    std::ostringstream out;
    out << number;
    return out.str();
  };
  names(texts, name + " is " + shown(value * 0.5 + 0.015625), name + " is " + shown(value));
}

TEST(Settings, OfOptimizersAreCompared) {
  names_value("AdamW's lr", &AdamW::lr);
  names_value("AdamW's beta1", &AdamW::beta1);
  names_value("AdamW's beta2", &AdamW::beta2, {.beta2 = 0.75});
  names_value("AdamW's eps", &AdamW::eps, {.eps = 0.5});
  names_value("AdamW's weight_decay", &AdamW::weight_decay);
  names_value("Adam's lr", &Adam::lr);
  names_value("Adam's beta1", &Adam::beta1);
  names_value("Adam's beta2", &Adam::beta2, {.beta2 = 0.75});
  names_value("Adam's eps", &Adam::eps, {.eps = 0.5});
  names_value("Adam's weight_decay", &Adam::weight_decay);
  names_value("SGD's lr", &SGD::lr);
  names_value("SGD's momentum", &SGD::momentum);
  names_value("SGD's dampening", &SGD::dampening);
  names_value("SGD's weight_decay", &SGD::weight_decay);
  names_value("RMSprop's lr", &RMSprop::lr);
  names_value("RMSprop's alpha", &RMSprop::alpha);
  names_value("RMSprop's eps", &RMSprop::eps, {.eps = 0.5});
  names_value("RMSprop's momentum", &RMSprop::momentum);
  names_value("RMSprop's weight_decay", &RMSprop::weight_decay);
  names(built(SGD{.momentum = 0.5}, [](Optimizer& own, Options&) { std::get<SGD>(own).nesterov = true; }),
        "SGD's nesterov is true", "SGD's nesterov is false");
  names(built(RMSprop{}, [](Optimizer& own, Options&) { std::get<RMSprop>(own).centered = true; }),
        "RMSprop's centered is true", "RMSprop's centered is false");
  names(built(AdamW{}, [](Optimizer& own, Options&) { own = Adam{}; }), "optimizer is Adam", "optimizer is AdamW");
  names(built(NoOptimizer{}, [](Optimizer& own, Options&) { own = RMSprop{}; }), "optimizer is RMSprop",
        "optimizer is none");
}

TEST(Settings, OfOptionsAreCompared) {
  const auto with = [](const std::function<void(Options&)>& change, Options base = {}) {
    return built(SGD{}, [&](Optimizer&, Options& own) { change(own); }, base);
  };
  Options scaled;
  scaled.loss_scale = LossScale{};
  names(with([](Options& o) { o.clip_norm = 0.1; }), "clip_norm is 0.1", "clip_norm is unset");
  names(with([](Options& o) { o.master_weights = false; }), "master_weights is false", "master_weights is true");
  names(with([](Options& o) { o.accumulate_dtype = at::kDouble; }), "accumulate_dtype is Double",
        "accumulate_dtype is unset");
  names(with([](Options& o) { o.hold_unsharded = true; }), "hold_unsharded is true", "hold_unsharded is false");
  names(with([](Options& o) { o.strategy = "zero2"; }), "strategy is 'zero2'", "strategy is 'ddp'");
  names(with([](Options& o) { o.mesh = {3, 1}; }), "mesh.replicate is 3", "mesh.replicate is 0");
  names(with([](Options& o) { o.mesh = {1, 3}; }, Options{.mesh = {1, 0}}), "mesh.shard is 3", "mesh.shard is 0");
  names(with([](Options& o) { o.cut = Cut::at_parameters; }), "cut at parameters is true",
        "cut at parameters is false");
  names(with([](Options& o) { o.cut = Cut::at_rows; }), "cut at rows is true", "cut at rows is false");
  names(with([](Options& o) { o.bucket_bytes = 77; }), "and 77 bytes", "and 4194304 bytes");
  names(with([](Options& o) { o.first_bucket_bytes = 77; }), "caps are 77 and 4194304 bytes",
        "caps are 1048576 and 4194304 bytes");
  names(with([](Options& o) { o.nonfinite = NonFinite::skip; }), "nonfinite is 1", "nonfinite is 0");
  names(with([](Options& o) { o.gather_ahead_bytes = 0; }), "gather_ahead_bytes is 0",
        "gather_ahead_bytes is 16777216");
  names(with([](Options& o) { o.ask_before_gathers = true; }), "ask_before_gathers is true",
        "ask_before_gathers is false");
  names(with([](Options& o) { o.virtual_ranks = 3; }), "virtual_ranks is 3", "virtual_ranks is 8");
  names(with([](Options& o) { o.deterministic = true, o.virtual_ranks = 3; }), "deterministic is true",
        "deterministic is false");
  names(with([](Options& o) { o.loss_scale = LossScale{}; }), "loss_scale is on", "loss_scale is unset");
  names(with([](Options& o) { o.loss_scale->initial = 8; }, scaled), "loss_scale.initial is 8",
        "loss_scale.initial is 65536");
  names(with([](Options& o) { o.loss_scale->growth = 4; }, scaled), "loss_scale.growth is 4", "loss_scale.growth is 2");
  names(with([](Options& o) { o.loss_scale->backoff = 0.25; }, scaled), "loss_scale.backoff is 0.25",
        "loss_scale.backoff is 0.5");
  names(with([](Options& o) { o.loss_scale->interval = 7; }, scaled), "loss_scale.interval is 7",
        "loss_scale.interval is 2000");
  names(with([](Options& o) { o.loss_scale->minimum = 0.5; }, scaled), "loss_scale.minimum is 0.5",
        "loss_scale.minimum is 0");
  names(with([](Options& o) { o.loss_scale->hysteresis = 2; }, scaled), "loss_scale.hysteresis is 2",
        "loss_scale.hysteresis is 1");
  names(with([](Options& o) { o.loss_scale->delay = 1; }, scaled), "loss_scale.delay is 1", "loss_scale.delay is 0");
  names(with([](Options& o) { o.loss_scale->recovery = LossScale::Recovery::at_a_good_step; }, scaled),
        "loss_scale.recovery at a good step is true", "loss_scale.recovery at a good step is false");
  names(with([](Options& o) { o.schedule.warmup = 7; }), "schedule.warmup is 7", "schedule.warmup is 0");
  names(with([](Options& o) { o.schedule.total = 7; }), "schedule.total is 7", "schedule.total is 0");
  names(with([](Options& o) { o.schedule.floor = 0.5; }), "schedule.floor is 0.5", "schedule.floor is 0.1");
  // Values that differ in their last bit only, too.
  names(with([](Options& o) { o.schedule.floor = std::nextafter(0.1, 1); }), "schedule.floor is 0.10000000000000002",
        "schedule.floor is 0.1");
  // Each rank may keep its ledger.
  EXPECT_THAT(with([](Options& o) { o.ledger = false; }), Each("none"));
}

TEST(Settings, OfGroupsAreCompared) {
  const auto of = [](const char* name) { return [=](const std::string& one) { return one == name; }; };
  Options base;
  base.groups.push_back({of("b"), 0.5, 0.25});
  const auto with = [&](const std::function<void(Options&)>& change) {
    return built(SGD{}, [&](Optimizer&, Options& own) { change(own); }, base);
  };
  names(with([](Options& o) { o.groups[0].lr = 0.75; }), "the lr of group 0 is 0.75", "the lr of group 0 is 0.5");
  names(with([](Options& o) { o.groups[0].lr.reset(); }), "the lr of group 0 is unset", "the lr of group 0 is 0.5");
  names(with([](Options& o) { o.groups[0].weight_decay = 0.0; }), "the weight_decay of group 0 is 0",
        "the weight_decay of group 0 is 0.25");
  names(with([](Options& o) { o.groups.clear(); }), "the number of groups is 0", "the number of groups is 1");
  names(with([&](Options& o) { o.groups[0].match = of("a"); }), "trained, in group 0", "trained");
}

// One rank's bad value is told to the others, who would wait for it otherwise.
TEST(Settings, ThatAreWrongOnOneRankAreAnErrorOnAll) {
  const auto one = [](const std::function<void(Optimizer&, Options&)>& change) { return built(AdamW{}, change); };
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = AdamW{.lr = -1}; }), Each(HasSubstr("learning rate is -1")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = RMSprop{.alpha = 1.5}; }), Each(HasSubstr("alpha is 1.5")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = RMSprop{.momentum = -1}; }), Each(HasSubstr("momentum")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = Adam{.eps = -1}; }), Each(HasSubstr("eps")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = Adam{.beta2 = 1}; }), Each(HasSubstr("betas")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = SGD{.momentum = -1}; }), Each(HasSubstr("momentum")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = SGD{.nesterov = true}; }), Each(HasSubstr("nesterov")));
  EXPECT_THAT(one([](Optimizer& own, Options&) { own = SGD{.weight_decay = -1}; }), Each(HasSubstr("decay is -1")));
  EXPECT_THAT(one([](Optimizer&, Options& o) { o.strategy = "zero9"; }), Each(HasSubstr("zero9")));
  EXPECT_THAT(one([](Optimizer&, Options& o) { o.clip_norm = 0; }), Each(HasSubstr("clip_norm")));
  EXPECT_THAT(one([](Optimizer&, Options& o) { o.loss_scale = LossScale{.backoff = 1}; }), Each(HasSubstr("backoff")));
  const auto any = [](const std::string&) { return true; };
  EXPECT_THAT(one([&](Optimizer&, Options& o) { o.groups = {{any, -1.0, {}}}; }), Each(HasSubstr("group 0 has lr -1")));
  EXPECT_THAT(one([&](Optimizer&, Options& o) { o.groups = {{any, {}, -1.0}}; }),
              Each(HasSubstr("group 0 has weight_decay -1")));
  EXPECT_THAT(one([&](Optimizer&, Options& o) { o.groups = {{any, {}, {}}, {nullptr, {}, {}}}; }),
              Each(HasSubstr("group 1 has no `match`")));
}

TEST(Settings, ThatChangeBetweenStepsAreComparedAtTheStep) {
  for (const std::string strategy : {"ddp", "zero2", "zero3"}) {
    const auto stepped = [&](const std::function<void(Engine&)>& change) {
      return errors(3, [&](World world) {
        at::Tensor a = leaf(), b = leaf();
        Options options;
        options.strategy = strategy;
        options.groups.push_back({[](const std::string& name) { return name == "a"; }, {}, {}});
        options.groups.push_back({[](const std::string& name) { return name == "b"; }, 0.5, {}});
        Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 0.25}, options);
        for (int step = 0; step < 2; ++step) {
          engine.backward((a + b).sum());
          if (step == 1 && world.rank() == 2) change(engine);
          engine.step();
        }
      });
    };
    EXPECT_THAT(stepped([](Engine& engine) { engine.set_lr(0.125); }),
                Each(AllOf(HasSubstr("lr is 0.125 on rank 2"), HasSubstr("0.25 on rank 0"), HasSubstr("step 1"))));
    EXPECT_THAT(stepped([](Engine& engine) { engine.set_lr(1, 0.125); }),
                Each(AllOf(HasSubstr("the lr of group 1 is 0.125 on rank 2"), HasSubstr("0.5 on rank 0"))));
    EXPECT_THAT(stepped([](Engine& engine) { engine.set_lr(0, 0.75); }),
                Each(AllOf(HasSubstr("the lr of group 0 is 0.75 on rank 2"), HasSubstr("0.25 on rank 0"))));
    EXPECT_THAT(stepped([](Engine&) {}), Each("none"));
  }
}

TEST(Settings, OfTheLearningRateAreAnsweredAndChecked) {
  at::Tensor a = leaf(), b = leaf(), c = leaf();
  Options options;
  options.groups.push_back({[](const std::string& name) { return name == "a"; }, 0.5, {}});
  options.groups.push_back({[](const std::string& name) { return name != "c"; }, {}, {}});  // "b": the first one wins
  Engine engine(World(), NamedTensors{{"a", a}, {"b", b}, {"c", c}}, {}, SGD{.lr = 0.25}, options);
  EXPECT_EQ(engine.lr(), 0.25);
  EXPECT_EQ(engine.lr(0), 0.5);
  EXPECT_EQ(engine.lr(1), 0.25);
  engine.set_lr(2);
  EXPECT_EQ(engine.lr(0), 0.5) << "has a rate of its own";
  EXPECT_EQ(engine.lr(1), 2) << "has the optimizer's";
  engine.set_lr(1, 3);
  engine.set_lr(4);
  EXPECT_EQ(engine.lr(1), 3);
  engine.backward((a + b + c).sum());
  const StepInfo info = engine.step();
  EXPECT_EQ(info.lr, 4);
  EXPECT_THAT(info.group_lrs, testing::ElementsAre(0.5, 3));
  EXPECT_TRUE(a.eq(-0.5).all().item<bool>());
  EXPECT_TRUE(b.eq(-3).all().item<bool>());
  EXPECT_TRUE(c.eq(-4).all().item<bool>());

  const auto error = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& found) {
      return found.what();
    }
    return "none";
  };
  EXPECT_THAT(error([&] { engine.set_lr(-1); }), HasSubstr("set_lr(-1)"));
  EXPECT_THAT(error([&] { engine.set_lr(0, NAN); }), HasSubstr("must be finite and not negative"));
  EXPECT_THAT(error([&] { engine.set_lr(INFINITY); }), HasSubstr("set_lr(inf)"));
  EXPECT_THAT(error([&] { engine.set_lr(2, 1); }), AllOf(HasSubstr("no parameter group 2"), HasSubstr("has 2")));
  EXPECT_THAT(error([&] { engine.lr(-1); }), HasSubstr("no parameter group -1"));
  EXPECT_EQ(engine.lr(), 4);
  at::Tensor d = leaf();
  Engine without(World(), NamedTensors{{"d", d}}, {});
  EXPECT_THAT(error([&] { without.set_lr(1); }), HasSubstr("without an optimizer"));
}

}  // namespace
}  // namespace plumb

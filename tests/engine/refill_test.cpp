// An engine's state in memory: another engine that takes it goes on as the first one did, bit for bit, or refuses it.
#include "engine/refill.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <array>
#include <future>

#include "engine/saving.h"
#include "save/support/folder.h"
#include "save/support/trained.h"

namespace plumb {
namespace {

using namespace test;
using save::Json;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct State {
  std::vector<at::Tensor> values;
  std::string words;
};

State state_of(Engine& engine) {
  State state;
  for (const SavedSlot& slot : all_slots(engine.impl())) {
    const at::Tensor value = slot.memory.defined() ? slot.memory : slot.owner.detach();
    EXPECT_EQ(value.numel(), slot.end - slot.begin) << slot.name;
    state.values.push_back(value.clone().flatten());
  }
  state.words = Json(words_of(engine.impl())).write();
  return state;
}

void take(Engine& engine, const State& state) {
  const Json words = Json::parse(state.words, "the words");
  check_words(engine.impl(), words);
  refill(engine.impl(), state.values, words);
}

Options options_for(const std::string& strategy, at::ScalarType dtype) {
  Options options;
  options.strategy = strategy;
  options.bucket_bytes = 200;
  options.first_bucket_bytes = 100;
  if (dtype != at::kFloat) options.accumulate_dtype = at::kFloat;
  if (dtype == at::kHalf) options.loss_scale = LossScale{.initial = 64, .interval = 2, .hysteresis = 3};
  options.groups = {{[](const std::string& name) { return name.starts_with("outside"); }, 0.01, {}},
                    {[](const std::string& name) { return name.ends_with("1"); }, {}, 0.25}};
  return options;
}

class RefillIn : public testing::TestWithParam<std::string> {};

// The second engine begins with other values, or has trained for a while, also what the first one never updated.
TEST_P(RefillIn, GoesOnAsTheFirstOneDid) {
  const std::vector<Optimizer> optimizers = {AdamW{.lr = 0.05}, SGD{.lr = 0.05, .momentum = 0.9},
                                             RMSprop{.lr = 0.05, .momentum = 0.5, .centered = true}, NoOptimizer{}};
  for (const int ranks : {1, 2}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (size_t which = 0; which < optimizers.size(); ++which) {
        if (which > 0 && dtype == at::kBFloat16) continue;
        for (const bool trained : {false, true}) {
          Everything now, later, taken, after;
          run_local(ranks, [&](World world) {
            SCOPED_TRACE(c10::str(ranks, " ranks, ", dtype, ", optimizer ", which, trained ? ", trained" : ", fresh"));
            const Options options = options_for(GetParam(), dtype);
            const bool rates = which < 3;
            State state;
            {
              Model model(3, dtype);
              Engine engine(world, model, optimizers[which], options);
              train(engine, model, 3, dtype);
              if (rates) engine.set_lr(0.25);
              if (rates) engine.set_lr(0, 0.125);
              state = state_of(engine);
              now.add(engine);
              world.barrier();
              train(engine, model, 2, dtype);
              later.add(engine);
              world.barrier();
            }
            Model model(4, dtype);
            Engine engine(world, model, optimizers[which], options);
            if (trained) {
              for (int i = 0; i < 2; ++i) engine.backward(model.loss(ones(1)));
              engine.step();
            }
            take(engine, state);
            for (const at::Tensor& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
            EXPECT_EQ(engine.steps(), 3);
            if (rates) {
              EXPECT_EQ(engine.lr(), 0.25);
              EXPECT_EQ(engine.lr(0), 0.125);
              EXPECT_EQ(engine.lr(1), 0.25) << "follows the engine's";
            }
            taken.add(engine);
            world.barrier();
            train(engine, model, 2, dtype);
            after.add(engine);
          });
          ASSERT_EQ(now.difference(taken), "") << which << " on " << ranks;
          ASSERT_EQ(later.difference(after), "") << which << " on " << ranks;
        }
      }
    }
  }
}

// Also where some of them are equal, and where another engine's began elsewhere.
TEST(Refill, AndLoadGiveEveryGroupItsOwnLearningRate) {
  const Scratch scratch;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(c10::str("seed ", seed));
    Draw draw(seed);
    Options options;
    for (int group = 0; group < 4; ++group) {
      const auto lr = draw.one_in(2) ? std::optional(1.0 + group) : std::nullopt;
      options.groups.push_back(
          {[group](const std::string& name) { return name.ends_with(std::to_string(group)); }, lr, {}});
    }
    Model first(3), second(4), third(5);
    Engine engine(World(), first, SGD{.lr = 1}, options), taker(World(), second, SGD{.lr = 1}, options),
        loader(World(), third, SGD{.lr = 1}, options);
    if (!draw.one_in(4)) engine.set_lr(draw.of<double>({0.125, 0.25}));
    std::array<bool, 4> own{};
    for (int group = 0; group < 4; ++group) {
      own[group] = options.groups[group].lr.has_value() || !draw.one_in(2);
      if (own[group] && !draw.one_in(4)) engine.set_lr(group, draw.of<double>({0.125, 0.25}));
    }
    take(taker, state_of(engine));
    loader.load(engine.save(scratch.path("all")));
    for (Engine* other : {&taker, &loader}) {
      EXPECT_EQ(other->lr(), engine.lr());
      for (int group = 0; group < 4; ++group) EXPECT_EQ(other->lr(group), engine.lr(group)) << group;
      other->set_lr(0.5);  // which groups without one of their own follow
      for (int group = 0; group < 4; ++group) {
        EXPECT_TRUE(own[group] || other->lr(group) == 0.5) << group;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, RefillIn, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

// Who asks for state beside a save brings a master to what its parameter was changed to; the save has what was there at the call.
TEST(Refill, AskedForBesideASaveLeavesWhatIsSaved) {
  const Scratch scratch;
  for (const std::string strategy : {"ddp", "zero1"}) {
    Everything then, loaded;
    run_local(2, [&](World world) {
      Model model(3, at::kBFloat16);
      Engine engine(world, model, AdamW{}, {.strategy = strategy});
      train(engine, model, 2, at::kBFloat16);
      then.add(engine);
      std::promise<void> asked;
      engine.impl().saving = std::make_shared<Saving>(engine.impl());
      engine.impl().saving->before_writing = [&] { asked.get_future().wait(); };
      world.barrier();
      engine.save_in_background(scratch.path(strategy));
      {
        at::NoGradGuard no_grad;
        for (const at::Tensor& p : model.parameters()) p.add_(1);
      }
      all_slots(engine.impl());
      asked.set_value();
      engine.finish_save();
    });
    run_local(1, [&](World world) {
      Model model(8, at::kBFloat16);
      Engine engine(world, model, AdamW{});
      engine.load(scratch.path(strategy));
      loaded.add(engine);
    });
    EXPECT_EQ(then.difference(loaded), "") << strategy;
  }
}

TEST(Refill, RefusesWordsOfAnEngineThatCannotBeFollowed) {
  struct One {
    explicit One(Optimizer optimizer, Options options = {})
        : model(3), engine(World(), model, std::move(optimizer), std::move(options)) {}
    Json words() { return Json(words_of(engine.impl())); }
    void check(const Json& theirs) { check_words(engine.impl(), theirs); }
    Model model;
    Engine engine;
  };
  Options scaled, grouped, single, four, eight;
  scaled.loss_scale = LossScale{};
  grouped.groups = {{[](const std::string&) { return true; }, 0.01, {}}};
  single.deterministic = four.deterministic = eight.deterministic = true;
  single.virtual_ranks = 1;
  four.virtual_ranks = 4;
  eight.virtual_ranks = 8;
  const auto refused = [](One& one, const Json& words, const std::string& what) {
    EXPECT_THAT([&] { one.check(words); }, ThrowsMessage<Error>(HasSubstr(what)));
  };
  One adam(AdamW{}), sgd(SGD{}), with_scale(AdamW{}, scaled), with_group(AdamW{}, grouped);
  adam.check(adam.words());
  refused(adam, sgd.words(), "of the optimizer SGD, and this engine has AdamW");
  refused(adam, with_scale.words(), "has a loss scale, and this engine has none");
  refused(with_scale, adam.words(), "has no loss scale, and this engine has one");
  refused(adam, with_group.words(), "has 1 parameter groups, and this engine 0");
  One shares(AdamW{}, four), more(AdamW{}, eight), fewest(AdamW{}, single);
  refused(shares, more.words(), "of 8 virtual ranks, and this engine has 4");
  refused(shares, fewest.words(), "of 1 virtual ranks, and this engine has 4");
  refused(fewest, shares.words(), "of 4 virtual ranks, and this engine has 1");
  shares.check(adam.words());  // a run that becomes deterministic, and one that ceases to be
  adam.check(shares.words());
  One none(NoOptimizer{}), users(UserOptimizer{});
  none.check(users.words());
  users.check(none.words());
  refused(none, adam.words(), "of the optimizer AdamW");
  refused(adam, none.words(), "and this engine has AdamW");

  const State state = state_of(adam.engine);
  State fewer = state;
  fewer.values.pop_back();
  EXPECT_THROW(take(adam.engine, fewer), std::exception);
  adam.engine.backward(adam.model.loss(ones(1)));
  EXPECT_THAT([&] { take(adam.engine, state); },
              ThrowsMessage<Error>(HasSubstr("load_state_dict() after 1 backwards")));
  EXPECT_THAT([&] { state_of(adam.engine); }, ThrowsMessage<Error>(HasSubstr("state_dict() after 1 backwards")));
}

}  // namespace
}  // namespace plumb

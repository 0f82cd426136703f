// Saves and loads of odd things, and of what cannot be: every rank is told alike, what to do, and training goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "engine/impl.h"
#include "engine/refill.h"
#include "engine/saving.h"
#include "save/folder.h"
#include "save/support/folder.h"
#include "save/support/trained.h"

namespace plumb {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(RefusedSave, OfCursorsThatDifferNamesBoth) {
  Scratch scratch;
  const auto texts = errors(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, SGD{}, {.strategy = "zero2"});
    try {
      engine.save(scratch.path("all"), {.samples = 8 + world.rank()});
    } catch (const SaveError&) {
      EXPECT_TRUE(save::checkpoints_in(scratch.path("all")).empty());
      engine.save(scratch.path("all"), {.samples = 17});
      EXPECT_EQ(engine.load(scratch.path("all")).samples, 17);
      throw;
    }
  });
  EXPECT_THAT(texts, Each(HasSubstr("failed on rank 1: save() with samples 9, and rank 0 with 8; it is one cursor")));
}

// What an extra throws is the user's own, and nobody else's end.
TEST(RefusedSave, OfAnExtraThatCannotIsAnErrorOfThatSaveAlone) {
  Scratch scratch;
  const auto nothing = [](const NamedTensors&) {};
  const std::vector<std::pair<Extra, std::string>> cases = {
      {Extra{"loader", {}, nothing}, "the extra 'loader' has no function to save with"},
      {Extra{"loader", []() -> NamedTensors { throw std::runtime_error("boo"); }, nothing}, "boo"},
      {Extra{"loader", []() -> NamedTensors { throw 5; }, nothing}, "an exception that is no std::exception"},
      {Extra{"loader", [] { return NamedTensors{{"x", at::eye(2).to_sparse()}}; }, nothing},
       "extra 'loader' (x) is no dense tensor; a checkpoint holds those alone"},
      {Extra{"loader", [] { return NamedTensors{{"x", at::Tensor()}}; }, nothing},
       "extra 'loader' (x) is no dense tensor"},
      // What libtorch throws, without the places that it was thrown through.
      {Extra{"loader", [] { return NamedTensors{{"x", at::ones({2}).view({3})}}; }, nothing},
       "shape '[3]' is invalid for input of size 2"}};
  for (const auto& [extra, why] : cases) {
    const auto texts = errors(2, [&](World world) {
      Model model(3);
      Engine engine(world, model, SGD{});
      try {
        engine.save(scratch.path("all"), {.extras = {extra}});
      } catch (const SaveError&) {
        train(engine, model, 1);
        engine.save(scratch.path("all"));
        throw;
      }
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("failed on rank 0: " + why), Not(HasSubstr("frame #")))));
  }
  Model model(3);
  Engine engine(World(), model, SGD{});
  engine.save(scratch.path("one"), {.extras = {Extra{"loader", [] { return NamedTensors{}; }, nothing}}});
  EXPECT_THAT(errors(1, [&](World) { engine.load(scratch.path("one"), {.extras = {Extra{"loader", {}, {}}}}); })[0],
              HasSubstr("the extra 'loader' has no function to load with"));
}

TEST(Save, HoldsTheNumbersOfExtrasThatAreConjugatedOrNegatedViews) {
  Scratch scratch;
  Model model(3);
  const at::Tensor numbers = at::complex(at::arange(3.), at::arange(3.) + 1);
  Engine engine(World(), model, SGD{});
  NamedTensors got;
  const auto views = [&] {  // the last one is dense: nothing but its bit tells that other numbers lie in its memory
    return NamedTensors{
        {"c", numbers.conj()}, {"n", at::imag(numbers)._neg_view()}, {"d", at::arange(1., 4.)._neg_view()}};
  };
  const Extra extra{"views", views, [&](const NamedTensors& saved) { got = saved; }};
  engine.save(scratch.path("all"), {.extras = {extra}});
  engine.load(scratch.path("all"), {.extras = {extra}});
  ASSERT_EQ(got.size(), 3u);
  EXPECT_TRUE(at::equal(got[0].second, at::complex(at::arange(3.), -at::arange(3.) - 1)));
  for (const int view : {1, 2}) EXPECT_TRUE(at::equal(got[view].second, -at::arange(3.) - 1)) << got[view].first;
}

// A thread that failed is heard at a step, which has done nothing then and can be taken.
TEST(RefusedSave, OfAThreadIsToldBeforeAStepChangesAnything) {
  Scratch scratch;
  for (const std::string strategy : {"ddp", "zero3"}) {
    run_local(2, [&](World world) {
      Model model(3);
      Engine engine(world, model, AdamW{}, {.strategy = strategy});
      train(engine, model, 1);
      engine.save(scratch.path(strategy));
      engine.impl().saving->before_writing = [&] {
        if (world.rank() == 1) throw std::runtime_error("the disk is on fire");
      };
      engine.save_in_background(scratch.path(strategy));
      std::string told;
      for (int i = 0; i < 100000 && told.empty(); ++i) {  // until the thread has come to it
        std::vector<at::Tensor> ones;
        for (const at::Tensor& p : model.parameters()) ones.push_back(at::ones(p.sizes(), at::kDouble));
        engine.backward(model.loss(ones));
        const int64_t steps = engine.steps();
        Everything before, after, taken;
        before.add(engine);
        try {
          engine.step();
        } catch (const SaveError& error) {
          told = error.what();
          after.add(engine);
          EXPECT_EQ(before.difference(after), "") << strategy;
          EXPECT_EQ(engine.steps(), steps);
          engine.step();
          taken.add(engine);
          EXPECT_EQ(engine.steps(), steps + 1);
          EXPECT_NE(before.difference(taken), "") << strategy;
        }
        engine.zero_grad();
      }
      EXPECT_THAT(told, HasSubstr("failed on rank 1: the disk is on fire")) << strategy;
      world.barrier();
      EXPECT_EQ(engine.load(scratch.path(strategy)).step, 1) << "the one before is whole";
    });
    EXPECT_EQ(save::checkpoints_in(scratch.path(strategy)).size(), 1u);
  }
}

struct Heard : c10::WarningHandler {
  void process(const c10::Warning& warning) override { text += warning.msg() + "\n"; }
  std::string text;
};

TEST(RefusedSave, OfAnEngineThatEndsIsLostAndSaysSo) {
  Scratch scratch;
  const std::string root = scratch.path("all");
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  Model model(3);
  {
    Engine engine(World(), model, AdamW{});
    train(engine, model, 1);
    engine.save(root);
    engine.save_in_background(root);
    engine.finish_save();
    train(engine, model, 1);
  }
  EXPECT_EQ(heard.text, "") << "nothing was under way";
  {
    Engine engine(World(), model, AdamW{});
    engine.load(root);
    train(engine, model, 1);
    engine.save_in_background(root);
  }
  EXPECT_THAT(heard.text,
              AllOf(HasSubstr("a checkpoint into '" + root + "' was under way when its engine ended, and is lost"),
                    HasSubstr("call engine.finish_save() first. Earlier ones are intact")));
  for (const std::string& name : save::names_in(root)) EXPECT_THAT(name, Not(HasSubstr("unfinished")));
  EXPECT_EQ(save::checkpoints_in(root).size(), 2u);
  Engine again(World(), model, AdamW{});
  EXPECT_EQ(again.load(root).step, 1);
}

TEST(RefusedSave, OfAnEngineThatEndsWhenItIsOnTheDiskIsNotLost) {
  Scratch scratch;
  const std::string root = scratch.path("all");
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  Model model(3);
  {
    Engine engine(World(), model, AdamW{});
    train(engine, model, 1);
    engine.save_in_background(root);
    // A step begins what gives it its name, and nobody asks again.
    while (save::checkpoints_in(root).empty()) {
      train(engine, model, 1);
      for (int i = 0; i < 100 && save::checkpoints_in(root).empty(); ++i) usleep(1000);
    }
  }
  EXPECT_EQ(heard.text, "");
  Engine again(World(), model, AdamW{});
  EXPECT_EQ(again.load(root).step, 1);
}

TEST(RefusedLoad, SaysThatThereIsNoFolder) {
  Scratch scratch;
  Model model(3);
  Engine engine(World(), model, SGD{});
  const auto said = [&](const std::string& name) {
    return errors(1, [&](World) { engine.load(scratch.path(name)); })[0];
  };
  EXPECT_THAT(said("none"), HasSubstr("none': there is no such folder"));
  std::filesystem::create_directory(scratch.path("empty"));
  EXPECT_THAT(said("empty"), AllOf(HasSubstr("no complete checkpoint in"), Not(HasSubstr("no such folder"))));
}

// A bad batch: its gradients are cleared, the last checkpoint is loaded, and the run is the one that never had it. A save in
// between holds what a save before it would.
TEST(GivenUp, BackwardsWhoseGradientsWereClearedLeaveNothingBehind) {
  const Scratch scratch;
  enum class Bad { backward, held, two, with_a_weight };
  for (const std::string strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    for (const bool deterministic : {false, true}) {
      const int ranks = strategy == "hsdp" ? 4 : 2;
      const std::string folder = scratch.path(c10::str(strategy, deterministic));
      Options options{
          .strategy = strategy, .bucket_bytes = 200, .deterministic = deterministic, .virtual_ranks = ranks};
      Everything then, wanted;
      std::string path;
      run_local(ranks, [&](World world) {
        Model model(3);
        Engine engine(world, model, AdamW{}, options);
        train(engine, model, 2);
        const std::string saved = engine.save(folder);
        if (world.rank() == 0) path = saved;
        then.add(engine);
        train(engine, model, 2);
        wanted.add(engine);
      });
      for (const Bad bad : {Bad::backward, Bad::held, Bad::two, Bad::with_a_weight}) {
        SCOPED_TRACE(c10::str(strategy, deterministic ? ", deterministic, " : ", ", static_cast<int>(bad)));
        const bool weights_alone = bad == Bad::two;
        Everything saved, found;
        run_local(ranks, [&](World world) {
          Model model(3), other(8);
          Engine engine(world, model, AdamW{}, options);
          train(engine, model, 2);
          for (int i = 0; i < (bad == Bad::two ? 2 : 1); ++i) {
            std::optional<NoSync> quiet;
            if (bad == Bad::held) quiet.emplace(engine);
            const auto weight = bad == Bad::with_a_weight ? std::optional<double>(3) : std::nullopt;
            engine.backward(model.loss(ones(NAN)).to(at::kFloat), false, weight);
          }
          engine.zero_grad();
          Engine second(world, other, AdamW{}, options);
          second.load(engine.save(folder));
          saved.add(second);
          weights_alone ? engine.load_weights(path) : engine.load(path);
          EXPECT_EQ(engine.grad_norm().item<double>(), 0) << "nothing waits for a reduction";
          train(engine, model, 2);
          found.add(engine);
        });
        EXPECT_EQ(then.difference(saved), "");
        EXPECT_EQ(wanted.difference(found), "");
      }
    }
  }
}

TEST(GivenUp, StepsThatSomeRanksAloneGaveUpAreNamedByAll) {
  const Scratch scratch;
  for (const std::string strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      Model model(3);
      Engine engine(world, model, AdamW{}, {.strategy = strategy});
      const std::string path = engine.save(scratch.path("all"));
      engine.backward(model.loss(ones(1)).to(at::kFloat));
      if (world.rank() == 1) engine.zero_grad();
      const auto says = [&](const std::string& call) {
        return testing::ThrowsMessage<Error>(
            AllOf(HasSubstr(call + " failed on rank 0"),
                  HasSubstr(call + " after 1 backwards of a step that has not ended")));
      };
      EXPECT_THAT([&] { engine.load(path); }, says("load()"));
      EXPECT_THAT([&] { engine.load_weights(path); }, says("load_weights()"));
      EXPECT_THAT([&] { engine.save(scratch.path("all")); }, says("save()"));
      if (world.rank() == 0) engine.zero_grad();
      engine.load(path);
      EXPECT_EQ(engine.steps(), 0);
    });
  }
}

TEST(Save, IntoOneFolderOfSeveralNamesIsOneRuns) {
  const Scratch scratch;
  std::filesystem::create_directories(scratch.path("a/b"));
  std::filesystem::create_directory_symlink(scratch.path("a"), scratch.path("link"));
  run_local(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, SGD{});
    for (const char* name : {"a", "a/b/../../a", "link", "./a", "a/"}) {
      EXPECT_NO_THROW(engine.save(scratch.path(name))) << name;
    }
    world.barrier();
    EXPECT_EQ(save::checkpoints_in(scratch.path("a")).size(), 5u);
  });
}

TEST(Background, IsBehindWhoeverTakesItsWeights) {
  const Scratch scratch;
  run_local(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, SGD{.lr = 1});
    engine.save(scratch.path("all"));
    train(engine, model, 1);
    const at::Tensor then = model.parameters()[0].detach().clone();
    engine.save_in_background(scratch.path("all"));
    train(engine, model, 1);
    engine.load_weights(scratch.path("all"));
    EXPECT_TRUE(model.parameters()[0].equal(then)) << "those of the newest";
  });
}

// At every moment of its rule: within its delay, beside skipped steps, before and after it grows.
TEST(Save, HoldsTheLossScaleAsItIs) {
  const Scratch scratch;
  for (const int64_t delay : {0, 3}) {
    const Options options{.loss_scale = LossScale{.initial = 64, .interval = 3, .hysteresis = 2, .delay = delay}};
    Model model(3), other(8);
    Engine engine(World(), model, SGD{}, options);
    for (const bool bad : {false, false, true, false, false, true, true, false, false, false, false, false}) {
      Engine second(World(), other, SGD{}, options);
      second.load(engine.save(scratch.path("all"), {.keep = 1}));
      Everything saved, found;
      saved.add(engine);
      found.add(second);
      EXPECT_EQ(saved.difference(found), "") << delay;
      EXPECT_EQ(words_of(engine.impl())[4].second.write(), words_of(second.impl())[4].second.write());
      engine.backward(model.loss(ones(bad ? NAN : 1)).to(at::kFloat));
      EXPECT_EQ(engine.step().skipped, bad);
      engine.zero_grad();
    }
  }
}

}  // namespace
}  // namespace plumb

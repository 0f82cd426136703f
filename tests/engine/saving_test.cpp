// A checkpoint goes from any world and strategy to any other bit for bit; what does not fit is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <chrono>
#include <filesystem>
#include <future>

#include "engine/refill.h"
#include "engine/saving.h"
#include "save/checkpoint.h"
#include "save/folder.h"
#include "save/support/folder.h"
#include "save/support/trained.h"

namespace plumb {
namespace {

using namespace test;
using ::testing::Each;
using ::testing::HasSubstr;

struct Numbers {
  const char* name;
  at::ScalarType dtype;
  bool scaled;
};
constexpr Numbers kNumbers[] = {{"f32", at::kFloat, false}, {"bf16", at::kBFloat16, false}, {"f16", at::kHalf, true}};
const std::vector<std::string> kStrategies = {"ddp", "zero1", "zero2", "zero3", "hsdp"};

Options options_for(const Numbers& numbers, const std::string& strategy) {
  Options options;
  options.strategy = strategy;
  options.bucket_bytes = 200;
  options.first_bucket_bytes = 100;
  if (numbers.dtype != at::kFloat) options.accumulate_dtype = at::kFloat;
  if (numbers.scaled) options.loss_scale = LossScale{.initial = 64, .interval = 2};
  options.groups = {{[](const std::string& name) { return name.starts_with("outside"); }, 0.01, {}}};
  return options;
}

class Matrix : public testing::TestWithParam<Numbers> {};

TEST_P(Matrix, OfWorldsAndStrategiesKeepsEveryBit) {
  const Numbers numbers = GetParam();
  Scratch scratch;
  struct Source {
    std::string path;
    int ranks = 0;
    Everything now, later;
  };
  std::vector<std::unique_ptr<Source>> sources;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const std::string& strategy : kStrategies) {
      Source& source = *sources.emplace_back(std::make_unique<Source>());
      source.path = scratch.path(strategy + std::to_string(ranks));
      source.ranks = ranks;
      run_local(ranks, [&](World world) {
        Model model(3, numbers.dtype);
        Engine engine(world, model, AdamW{.lr = 0.05}, options_for(numbers, strategy));
        train(engine, model, 3, numbers.dtype);
        engine.set_lr(0.25);
        engine.set_lr(0, 0.125);
        const std::string path = engine.save(source.path, {.samples = 48});
        EXPECT_THAT(path, HasSubstr("step-3"));
        source.now.add(engine);
        train(engine, model, 1, numbers.dtype);
        source.later.add(engine);
      });
    }
  }
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const std::string& strategy : kStrategies) {
      std::vector<Everything> now(sources.size()), later(sources.size());
      run_local(ranks, [&](World world) {
        Model model(4, numbers.dtype);  // other values
        Engine engine(world, model, AdamW{.lr = 0.05}, options_for(numbers, strategy));
        for (size_t i = 0; i < sources.size(); ++i) {
          const LoadInfo info = engine.load(sources[i]->path);
          EXPECT_EQ(info.step, 3);
          EXPECT_EQ(info.samples, 48);
          now[i].add(engine);
          EXPECT_EQ(engine.lr(0), 0.125);
          world.barrier();
          train(engine, model, 1, numbers.dtype);
          later[i].add(engine);
          world.barrier();
        }
      });
      for (size_t i = 0; i < sources.size(); ++i) {
        const std::string way = c10::str(sources[i]->path, " to ", strategy, ranks);
        ASSERT_EQ(sources[i]->now.difference(now[i]), "") << way;
        // Sums over three ranks are rounded.
        if (ranks == 3 || sources[i]->ranks == 3) continue;
        ASSERT_EQ(sources[i]->later.difference(later[i]), "") << way;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Numbers, Matrix, testing::ValuesIn(kNumbers),
                         [](const auto& info) { return info.param.name; });

TEST(Save, WritesReplicatedStateOnceSplitOverTheRanks) {
  Scratch scratch;
  run_local(4, [&](World world) {
    Model model(3);
    Engine engine(world, model, AdamW{});
    train(engine, model, 1);
    engine.save(scratch.path("all"));
  });
  const save::Checkpoint checkpoint(*save::newest_in(scratch.path("all")));
  std::set<std::string> writers;  // of weights and optimizer state
  for (const auto& file : checkpoint.manifest().files) {
    if (!file.name.starts_with("rest")) writers.insert(file.name.substr(file.name.find("-0")));
  }
  EXPECT_EQ(writers.size(), 4u);
  for (const auto& tensor : checkpoint.manifest().tensors) checkpoint.verify(tensor);
  int64_t elements = 0;
  for (const auto& tensor : checkpoint.manifest().tensors) {
    int64_t end = 0;
    for (const auto& part : tensor.parts) {
      EXPECT_EQ(part.begin, end);
      end = part.end;
    }
    elements += tensor.kind == save::Kind::weight ? end : 0;
  }
  EXPECT_EQ(elements, 37 + 1 + 0 + 16 + 5 + 35 + 3 + 1 + 24);
}

TEST(Save, RestoresGenerators) {
  Scratch scratch;
  Model model(3);
  Engine engine(World(), model, SGD{});
  torch::manual_seed(11);
  at::rand({3});
  engine.save(scratch.path("all"));
  const at::Tensor next = at::rand({5});
  torch::manual_seed(99);
  engine.load(scratch.path("all"));
  EXPECT_TRUE(at::rand({5}).equal(next));
}

TEST(Save, KeepsExtrasAndTheNewestOnly) {
  Scratch scratch;
  Model model(3);
  Engine engine(World(), model, SGD{});
  at::Tensor mine = at::arange(4), loaded;
  const Extra extra{"loader", [&] { return NamedTensors{{"order", mine}, {"epoch", at::tensor(int64_t{7})}}; },
                    [&](const NamedTensors& saved) { loaded = saved[0].second; }};
  for (int i = 0; i < 3; ++i) engine.save(scratch.path("all"), {.keep = 2, .extras = {extra}});
  EXPECT_EQ(save::checkpoints_in(scratch.path("all")).size(), 2u);
  for (int i = 0; i < 2; ++i) engine.save(scratch.path("all"), {.extras = {extra}});  // as many as there are
  EXPECT_EQ(save::checkpoints_in(scratch.path("all")).size(), 4u);
  engine.load(scratch.path("all"), {.extras = {extra}});
  EXPECT_TRUE(loaded.equal(mine));
  EXPECT_THAT(errors(1, [&](World) { engine.load(scratch.path("all")); })[0], HasSubstr("extra     extra 'loader'"));
}

TEST(Load, RefusesWhatDoesNotFitAndChangesNothing) {
  Scratch scratch;
  {
    Model model(3);
    Engine engine(World(), model, AdamW{});
    train(engine, model, 2);
    engine.save(scratch.path("all"));
  }
  struct Other : Model {
    Other() : Model(5) { extra = register_parameter("more", at::ones({3})); }
    at::Tensor extra;
  };
  const auto texts = errors(2, [&](World world) {
    Other model;
    Engine engine(world, model, SGD{.momentum = 0.9}, {.strategy = "zero3"});
    Everything before, after;
    before.add(engine);
    std::string text;
    try {
      engine.load(scratch.path("all"));
    } catch (const Error& error) {
      text = error.what();
    }
    after.add(engine);
    EXPECT_EQ(before.difference(after), "");
    // What fits is loaded when it is asked for, and the engine goes on.
    const LoadInfo info = engine.load(scratch.path("all"), {.strict = false});
    EXPECT_FALSE(info.mismatches.empty());
    EXPECT_EQ(engine.steps(), 2);
    if (!text.empty()) throw std::runtime_error(text);
  });
  EXPECT_THAT(texts, Each(HasSubstr("missing   weight 'more'")));
  EXPECT_THAT(texts, Each(HasSubstr("the optimizer  saved AdamW  here SGD")));
  EXPECT_THAT(texts, Each(HasSubstr("extra     optimizer 'inside.w0' (mean)")));
}

// An extra that counts what it was given; some refuse it.
struct Counter {
  int64_t value = 0;
  bool refuses = false;
  int times = 0;  // load() was called
  Extra as(const std::string& name) {
    return {name, [this] { return NamedTensors{{"value", at::tensor(value)}}; },
            [this](const NamedTensors& saved) {
              ++times;
              if (refuses) throw std::runtime_error("no, thanks");
              value = saved.at(0).second.item<int64_t>();
            }};
  }
};

TEST(Load, GivesExtrasBackWhatTheyHadWhenOneOfThemRefuses) {
  Scratch scratch;
  const auto texts = errors(2, [&](World world) {
    Model model(3), other(5);
    Counter first{7}, second{8};
    {
      Engine engine(world, model, AdamW{});
      train(engine, model, 1);
      engine.save(scratch.path("all"), {.extras = {first.as("first"), second.as("second")}});
    }
    Engine engine(world, other, AdamW{});
    Everything before, after;
    before.add(engine);
    first.value = 1;
    second.value = 2;
    second.refuses = world.rank() == 1;  // rank 0's second takes it, and must not keep it
    std::string text;
    try {
      engine.load(scratch.path("all"), {.extras = {first.as("first"), second.as("second")}});
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_EQ(first.value, 1);
    EXPECT_EQ(second.value, 2);
    EXPECT_EQ(engine.steps(), 0);
    after.add(engine);
    EXPECT_EQ(before.difference(after), "");
    second.refuses = false;
    engine.load(scratch.path("all"), {.extras = {first.as("first"), second.as("second")}});
    EXPECT_EQ(first.value, 7);
    EXPECT_EQ(second.value, 8);
    throw std::runtime_error(text);
  });
  EXPECT_THAT(texts, Each(HasSubstr("load() failed on rank 1: no, thanks")));
}

TEST(Load, AsksNoExtraBeforeEveryByteIsCompared) {
  Scratch scratch;
  Model model(3);
  Engine engine(World(), model, AdamW{});
  train(engine, model, 1);
  Counter counter{7};
  const std::string path = engine.save(scratch.path("all"), {.extras = {counter.as("counter")}});
  const std::string file = path + "/optimizer-00000-of-00001.safetensors";
  std::string bytes = Scratch::read_file(file);
  bytes.back() ^= 1;
  Scratch::write_file(file, bytes);
  EXPECT_THROW(engine.load(path, {.extras = {counter.as("counter")}}), Error);
  EXPECT_EQ(counter.times, 0);
}

TEST(Save, LeavesOutFrozenWeightsThatOthersHave) {
  Scratch scratch;
  const auto texts = errors(2, [&](World world) {
    Model model(3);
    const std::string frozen = model.named_parameters()[1].key(), trained = model.named_parameters()[0].key();
    model.parameters()[1].set_requires_grad(false);
    Engine engine(world, model, AdamW{}, {.strategy = "zero3"});
    train(engine, model, 1);
    const std::string path = engine.save(scratch.path("all"), {.leave_out = {frozen}});
    EXPECT_EQ(save::Checkpoint(path).manifest().find(save::Kind::weight, frozen), nullptr);
    EXPECT_NE(save::Checkpoint(path).manifest().find(save::Kind::weight, trained), nullptr);
    EXPECT_THROW(engine.load(path), Error);
    const LoadInfo info = engine.load(path, {.strict = false});
    ASSERT_EQ(info.mismatches.size(), 1u) << info.table();
    EXPECT_EQ(info.mismatches[0].what, "weight '" + frozen + "'");
    // On one rank alone: an error on both.
    engine.save(scratch.path("all"), {.leave_out = {world.rank() == 1 ? trained : frozen}});
  });
  EXPECT_THAT(texts, Each(HasSubstr("which is no frozen parameter of this engine")));
}

TEST(Load, RefusesASaveBetweenABackwardAndItsStep) {
  Scratch scratch;
  const auto texts = errors(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, AdamW{});
    std::vector<at::Tensor> gradients(Parts::kCount);
    gradients[0] = at::ones({7, 5}, at::kDouble);
    engine.backward(model.loss(gradients));
    engine.save(scratch.path("all"));
  });
  EXPECT_THAT(texts, Each(HasSubstr("backwards of a step that has not ended")));
  EXPECT_TRUE(save::checkpoints_in(scratch.path("all")).empty());
}

TEST(Load, TakesWeightsAloneInAnotherDtype) {
  Scratch scratch;
  Model source(3, at::kBFloat16);
  {
    Engine engine(World(), source, AdamW{}, {.accumulate_dtype = at::kFloat});
    train(engine, source, 2, at::kBFloat16);
    engine.save(scratch.path("all"));
  }
  run_local(2, [&](World world) {
    Model model(9);
    Engine engine(world, model, AdamW{}, {.strategy = "zero3"});
    train(engine, model, 1);
    engine.load_weights(scratch.path("all"));
    EXPECT_EQ(engine.steps(), 1);
    const auto expected = source.parameters();
    const auto found = model.parameters();
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(engine.full_parameter(found[i]).equal(expected[i].detach().to(at::kFloat))) << i;
    }
    EXPECT_TRUE(model.running.equal(source.running));
  });
}

TEST(Load, FollowsAnotherOrderOfMemory) {
  Scratch scratch;
  struct Picture : torch::nn::Module {
    explicit Picture(bool last) {
      at::Tensor value = noise({2, 3, 4, 5}, last ? 1 : 2).to(at::kFloat);
      weight = register_parameter("weight", last ? value.contiguous(at::MemoryFormat::ChannelsLast) : value);
    }
    at::Tensor weight;
  };
  Picture saved(true);
  {
    Engine engine(World(), saved, SGD{.momentum = 0.9});
    (saved.weight * noise({2, 3, 4, 5}, 5).to(at::kFloat)).sum().backward();
    engine.step();
    engine.save(scratch.path("all"));
  }
  run_local(2, [&](World world) {
    Picture model(false);
    Engine engine(world, model, SGD{.momentum = 0.9}, {.strategy = "zero1"});
    engine.load(scratch.path("all"));
    EXPECT_TRUE(model.weight.equal(saved.weight));
    Picture other(false);
    Engine fresh(world, other, SGD{.momentum = 0.9}, {.strategy = "zero1"});
    fresh.load_weights(scratch.path("all"));
    EXPECT_TRUE(other.weight.equal(saved.weight)) << "of weights alone";
  });
}

TEST(Background, SavesWhatWasThereAtTheCall) {
  Scratch scratch;
  for (const std::string& strategy : kStrategies) {
    Everything then, loaded;
    run_local(2, [&](World world) {
      Model model(3);
      Engine engine(world, model, AdamW{}, {.strategy = strategy});
      train(engine, model, 2);
      then.add(engine);
      world.barrier();
      engine.save_in_background(scratch.path(strategy));
      train(engine, model, 3);
      EXPECT_THAT(engine.finish_save(), HasSubstr("step-2"));
    });
    run_local(1, [&](World world) {
      Model model(8);
      Engine engine(world, model, AdamW{});
      engine.load(scratch.path(strategy));
      loaded.add(engine);
    });
    EXPECT_EQ(then.difference(loaded), "") << strategy;
  }
}

// The thread that writes comes to nothing before the steps are over: they copy what they are about to change.
TEST(Background, SavesWhatWasThereAtTheCallHoweverLateItsThreadIs) {
  Scratch scratch;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::string& strategy : kStrategies) {
      const std::string path = scratch.path(strategy + std::string(c10::toString(dtype)));
      Everything then, loaded;
      run_local(2, [&](World world) {
        Model model(3, dtype);
        Engine engine(world, model, AdamW{}, {.strategy = strategy});
        train(engine, model, 2, dtype);
        then.add(engine);
        std::promise<void> trained;
        engine.impl().saving = std::make_shared<Saving>(engine.impl());
        engine.impl().saving->before_writing = [&] { trained.get_future().wait(); };
        world.barrier();
        engine.save_in_background(path);
        {
          at::NoGradGuard no_grad;
          model.outside->parameters()[0].add_(1);  // the user's own change, before any step
        }
        train(engine, model, 3, dtype);
        trained.set_value();
        EXPECT_THAT(engine.finish_save(), HasSubstr("step-2"));
      });
      run_local(1, [&](World world) {
        Model model(8, dtype);
        Engine engine(world, model, AdamW{});
        engine.load(path);
        loaded.add(engine);
      });
      EXPECT_EQ(then.difference(loaded), "") << strategy << " " << dtype;
    }
  }
}

TEST(Background, HoldsWhatWasThereBeforeAStateFromMemory) {
  Scratch scratch;
  Model model(3), fresh(8);
  Engine engine(World(), model, AdamW{});
  train(engine, model, 2);
  Everything then, loaded;
  then.add(engine);
  std::promise<void> refilled;
  engine.impl().saving = std::make_shared<Saving>(engine.impl());
  engine.impl().saving->before_writing = [&] { refilled.get_future().wait(); };
  engine.save_in_background(scratch.path("all"));
  std::vector<at::Tensor> values;
  for (const SavedSlot& slot : all_slots(engine.impl())) {
    values.push_back(at::ones({slot.end - slot.begin}, slot.dtype()));
  }
  refill(engine.impl(), values, save::Json(words_of(engine.impl())));
  refilled.set_value();
  engine.finish_save();
  Engine other(World(), fresh, AdamW{});
  other.load(scratch.path("all"));
  loaded.add(other);
  EXPECT_EQ(then.difference(loaded), "");
}

TEST(Background, WritesIntoTheFolderThatWasMeantAtTheCall) {
  Scratch scratch;
  const std::string before = std::filesystem::current_path().string();
  std::filesystem::create_directory(scratch.path("here"));
  std::filesystem::create_directory(scratch.path("there"));
  Model model(3);
  Engine engine(World(), model, AdamW{});
  train(engine, model, 1);
  std::promise<void> moved;
  engine.impl().saving = std::make_shared<Saving>(engine.impl());
  engine.impl().saving->before_writing = [&] { moved.get_future().wait(); };
  std::filesystem::current_path(scratch.path("here"));
  engine.save_in_background("a");
  std::filesystem::current_path(scratch.path("there"));
  moved.set_value();
  const std::string path = engine.finish_save();
  EXPECT_TRUE(std::filesystem::equivalent(std::filesystem::path(path).parent_path(), scratch.path("here") + "/a"));
  EXPECT_NO_THROW(engine.load(path));
  EXPECT_TRUE(save::names_in(scratch.path("there")).empty());
  std::filesystem::current_path(before);
}

// The memory of one snapshot serves the next: not before the first is on the disk.
TEST(Background, OneBehindTheOtherHoldsWhatWasThereAtEachCall) {
  Scratch scratch;
  constexpr int kTimes = 4;
  Everything then[kTimes], loaded[kTimes];
  run_local(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, AdamW{}, {.strategy = "zero3"});
    for (int i = 0; i < kTimes; ++i) {
      then[i].add(engine);  // the first without the optimizer's memory: the next ones need more room
      world.barrier();
      engine.save_in_background(scratch.path(std::to_string(i)));
      train(engine, model, 1);
    }
    engine.finish_save();
  });
  for (int i = 0; i < kTimes; ++i) {
    Model model(8);
    Engine engine(World(), model, AdamW{});
    engine.load(scratch.path(std::to_string(i)));
    loaded[i].add(engine);
    EXPECT_EQ(then[i].difference(loaded[i]), "") << i;
  }
}

TEST(Background, SaysAtTheNextStepThatItFailed) {
  Scratch scratch;
  const auto texts = errors(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, AdamW{});
    train(engine, model, 1);
    engine.save_in_background(scratch.path("all"),
                              {.extras = {{"bad", []() -> NamedTensors { throw std::runtime_error("no extra"); },
                                           [](const NamedTensors&) {}}}});
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (std::chrono::steady_clock::now() < end) train(engine, model, 1);
  });
  EXPECT_THAT(texts, Each(HasSubstr("save() failed on rank 0: no extra")));
  EXPECT_TRUE(save::checkpoints_in(scratch.path("all")).empty());
}

}  // namespace
}  // namespace plumb

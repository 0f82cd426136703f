// How an engine is built: which options it refuses, which parameters are in which unit, what is one parameter and what is
// two, and whose values all ranks begin with.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <set>
#include <thread>

#include "engine/impl.h"
#include "engine/owners.h"
#include "engine/support/plain.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

using namespace test;
using testing::Each;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

// ---- options

std::vector<std::string> built(int ranks, const Options& options) {
  return errors(ranks, [&](World world) {
    at::Tensor weight = at::zeros({4}).requires_grad_();
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{}, options);
  });
}

struct Setting {
  std::string words;  // of the refusal; empty: it is taken
  Options options;
  int ranks = 1;
};

TEST(Construction, RefusesOptionsOutOfTheirRangesAndTakesThoseAtTheirEnds) {
  const auto scale = [](LossScale rule) { return Options{.loss_scale = rule}; };
  const auto shares = [](int count, const std::string& strategy = "ddp", Mesh mesh = {}) {
    return Options{.strategy = strategy, .mesh = mesh, .deterministic = true, .virtual_ranks = count};
  };
  const double nan = std::nan("");
  const std::vector<Setting> all = {
      {"gather_ahead_bytes is -1", {.gather_ahead_bytes = -1}},
      {"", {.gather_ahead_bytes = 0}},
      {"bucket caps are 1048576 and 0", {.bucket_bytes = 0}},
      {"bucket caps are 0 and 4194304", {.first_bucket_bytes = 0}},
      {"", {.bucket_bytes = 1, .first_bucket_bytes = 1}},
      {"clip_norm is 0", {.clip_norm = 0.0}},
      {"clip_norm is -1", {.clip_norm = -1.0}},
      {"clip_norm is nan", {.clip_norm = nan}},
      {"", {.clip_norm = 1e-300}},
      {"", {.clip_norm = INFINITY}},
      {"initial > 0", scale({.initial = 0})},
      {"initial > 0", scale({.initial = nan})},
      {"growth >= 1", scale({.growth = 0.99})},
      {"", scale({.growth = 1})},
      {"backoff between", scale({.backoff = 0})},
      {"backoff between", scale({.backoff = 1})},
      {"", scale({.backoff = 0.999})},
      {"interval > 0", scale({.interval = 0})},
      {"", scale({.interval = 1})},
      {"minimum >= 0", scale({.minimum = -1})},
      {"hysteresis >= 1", scale({.hysteresis = 0})},
      {"delay >= 0", scale({.delay = -1})},
      {"", scale({.initial = 1e-9, .minimum = 0, .hysteresis = 1, .delay = 0})},
      {"into 0 shares", shares(0)},
      {"into -2 shares", shares(-2), 2},
      {"into 3 shares", shares(3), 2},
      {"into 6 shares", shares(6), 3},
      {"", shares(3), 3},
      {"", shares(6), 2},
      {"", shares(4), 4},
      {"", shares(1), 1},
      {"", shares(6, "hsdp", {2, 1}), 2},
      {"into 6 shares", shares(6, "hsdp", {3, 2}), 6},
      {"accumulate_dtype is Int", {.accumulate_dtype = at::kInt}},
      {"", {.accumulate_dtype = at::kDouble}},
      {"zero7", {.strategy = "zero7"}},
  };
  for (size_t i = 0; i < all.size(); ++i) {
    const auto texts = built(all[i].ranks, all[i].options);
    if (all[i].words.empty()) {
      EXPECT_THAT(texts, Each("none")) << "row " << i;
    } else {
      EXPECT_THAT(texts, Each(HasSubstr(all[i].words))) << "row " << i;
    }
    Options off = all[i].options;  // without `deterministic` its shares are nobody's business
    if (!off.deterministic) continue;
    off.deterministic = false;
    EXPECT_THAT(built(all[i].ranks, off), Each("none")) << "row " << i;
  }
}

// ---- the mesh

// Where nobody chose one, what replicates does so between machines, and shards inside of them.
TEST(Construction, ReplicatesBetweenMachinesUnlessAMeshIsChosen) {
  struct Row {
    std::string strategy;
    int ranks, each;  // on a machine; 0: nobody knows
    Mesh chosen;
    int replicate;  // that come out
  };
  const std::vector<Row> rows = {
      {"hsdp", 6, 2, {}, 3},           {"hsdp", 6, 3, {}, 2},
      {"hsdp", 4, 2, {}, 2},           {"hsdp", 6, 1, {}, 2},  // those of the strategy, from here on
      {"hsdp", 6, 6, {}, 2},           {"hsdp", 6, 0, {}, 2},
      {"zero3", 6, 2, {}, 1},          {"hsdp", 6, 2, {.replicate = 2}, 2},
      {"hsdp", 6, 2, {.shard = 6}, 1},
  };
  for (const Row& row : rows) {
    run_local(row.ranks, [&](World world) {
      world.impl().ranks_per_machine = row.each;
      at::Tensor weight = at::zeros({4}).requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{}, {.strategy = row.strategy, .mesh = row.chosen});
      const Mesh& mesh = engine.impl().reducer->team().mesh();
      EXPECT_EQ(mesh.replicate, row.replicate) << row.strategy << " on " << row.ranks << ", " << row.each << " each";
      EXPECT_EQ(mesh.shard, row.ranks / row.replicate);
    });
  }
}

// ---- units

struct Leaf : torch::nn::Module {
  Leaf(int64_t size, const at::Tensor& shared = {}) {
    weight = register_parameter("weight", at::arange(size, at::kDouble));
    if (shared.defined()) register_parameter("shared", shared);
  }
  at::Tensor forward() {
    at::Tensor sum = weight.sum();
    if (const auto* shared = named_parameters(false).find("shared")) sum = sum + 10 * shared->sum();
    return sum;
  }
  at::Tensor weight;
};

// A unit around two others, of which one shares a weight with the outside and one with its neighbour.
struct Nest : torch::nn::Module {
  struct Around : torch::nn::Module {
    Around(const at::Tensor& outside, const at::Tensor& both) {
      own = register_parameter("own", at::arange(40, at::kDouble));
      plain = register_module("plain", std::make_shared<Leaf>(33));
      first = register_module("first", std::make_shared<Leaf>(50, outside));
      second = register_module("second", std::make_shared<Leaf>(60, both));
    }
    at::Tensor forward() { return own.sum() + plain->forward() + first->forward() + second->forward(); }
    at::Tensor own;
    std::shared_ptr<Leaf> plain;
    Unit<Leaf> first{nullptr}, second{nullptr};
  };
  Nest() {
    const at::Tensor outside = at::arange(21, at::kDouble).requires_grad_();
    const at::Tensor both = at::arange(35, at::kDouble).requires_grad_();
    top = register_parameter("top", at::arange(5, at::kDouble));
    kept = register_parameter("kept", outside);
    around = register_module("around", std::make_shared<Around>(outside, both));
    third = register_module("third", std::make_shared<Leaf>(70, both));
    empty = register_module("empty", std::make_shared<Only>(outside));
  }
  // A unit with nothing of its own but what is used outside of it.
  struct Only : torch::nn::Module {
    explicit Only(const at::Tensor& outside) { weight = register_parameter("weight", outside); }
    at::Tensor forward() { return 100 * weight.sum(); }
    at::Tensor weight;
  };
  at::Tensor forward() { return top.sum() + kept.sum() + around->forward() + third->forward() + empty->forward(); }
  at::Tensor top, kept;
  Unit<Around> around{nullptr};
  Unit<Leaf> third{nullptr};
  Unit<Only> empty{nullptr};
};

TEST(Construction, FindsUnitsInsideOfUnitsAndWhatIsUsedOutsideOfThem) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](World world) {
      Nest model;
      std::map<std::string, at::Tensor> before;
      for (const auto& item : model.named_parameters()) before[item.key()] = item.value().detach().clone();
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero3"});
      std::set<std::string> cut;
      for (const auto& [name, rows] : engine.shards()) cut.insert(name);
      if (ranks == 1) {
        EXPECT_TRUE(cut.empty());
        EXPECT_EQ(engine.impl().units, nullptr);
      } else {
        EXPECT_THAT(cut, UnorderedElementsAre("around.own", "around.plain.weight", "around.first.weight",
                                              "around.second.weight", "around.second.shared", "third.weight"));
        // What a unit holds is its own: not what the units inside of it hold.
        std::map<std::string, int> unit_of;
        for (const Sink& sink : engine.impl().reducer->sinks()) unit_of[sink.name] = sink.unit;
        EXPECT_EQ(unit_of.at("top"), -1);
        EXPECT_EQ(unit_of.at("kept"), -1);
        EXPECT_EQ(unit_of.at("around.own"), unit_of.at("around.plain.weight"));
        const std::set<int> different = {unit_of.at("around.own"), unit_of.at("around.first.weight"),
                                         unit_of.at("around.second.weight"), unit_of.at("third.weight")};
        EXPECT_EQ(different.size(), 4U);
        EXPECT_FALSE(different.contains(-1));
        EXPECT_EQ(unit_of.at("around.second.shared"), unit_of.at("around.second.weight")) << "the first one's";
      }
      model.forward().backward();
      engine.step();
      // Uses of each: `kept` once outside, ten times in `first`, a hundred in `empty`; `shared` ten times in two units.
      const std::map<std::string, double> drop = {{"kept", 111}, {"around.second.shared", 20}};
      std::set<const void*> seen;
      for (const auto& item : model.named_parameters()) {
        if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
        const auto found = drop.find(item.key());
        const at::Tensor wanted = before.at(item.key()) - (found == drop.end() ? 1.0 : found->second);
        EXPECT_TRUE(engine.full_parameter(item.value()).equal(wanted)) << item.key() << " on " << ranks;
      }
    });
  }
}

// ---- values

// A tensor of two names is one, parameter or buffer; one that is not there is none; rank 0's values are everybody's.
TEST(Construction, TakesATensorOfTwoNamesOnceAndRankZerosValues) {
  struct Tied : torch::nn::Module {
    explicit Tied(double value) {
      weight = register_parameter("weight", at::full({6}, value));
      again = register_parameter("again", weight);
      buffer = register_buffer("buffer", at::full({3}, value));
      register_buffer("the_same", buffer);
      register_buffer("none", at::Tensor());
      flag = register_buffer("flag", at::full({2}, value == 1, at::kBool));
    }
    at::Tensor weight, again, buffer, flag;
  };
  run_local(3, [](World world) {
    Tied model(world.rank() + 1);
    Engine engine(world, model, SGD{.lr = 1});
    EXPECT_EQ(engine.impl().parameters.size(), 1U);
    EXPECT_EQ(engine.impl().parameters[0].first, "weight");
    EXPECT_EQ(engine.impl().buffers.size(), 2U);
    EXPECT_TRUE(model.weight.detach().equal(at::ones({6})));
    EXPECT_TRUE(model.buffer.equal(at::ones({3})));
    EXPECT_TRUE(model.flag.all().item<bool>());
    engine.backward((model.weight + 2 * model.again).sum());
    engine.step();
    EXPECT_TRUE(model.weight.detach().equal(at::full({6}, -2.0)));
  });
}

// What is equal already on a rank is not written: a graph that saved it stays good.
TEST(Construction, AndStepsLeaveBuffersAloneThatAreEqualAlready) {
  run_local(2, [](World world) {
    at::Tensor weight = at::ones({3}).requires_grad_(), same = at::ones({3}), other = at::ones({3});
    Engine engine(world, NamedTensors{{"w", weight}}, NamedTensors{{"same", same}, {"other", other}}, SGD{});
    other.add_(world.rank());
    const auto version = same._version();
    const auto changed = other._version();
    const at::Tensor loss = (weight * same).sum();
    engine.backward(weight.sum());
    engine.step();
    EXPECT_EQ(same._version(), version) << world.rank();
    EXPECT_TRUE(other.equal(at::ones({3})));
    EXPECT_EQ(other._version() == changed, world.rank() == 0);
  });
}

// An engine that was refused has no parameters: another one may have them. So may one that follows another.
TEST(Construction, ThatFailsLeavesItsParametersToTheNextEngine) {
  const auto texts = errors(2, [](World world) {
    at::Tensor weight = at::zeros({3}).requires_grad_();
    const NamedTensors named = {{"w", weight}};
    EXPECT_THROW(Engine(world, named, {}, SGD{.lr = world.rank() == 0 ? -1.0 : 1.0}), Error);
    EXPECT_THROW(Engine(world, named, {}, SGD{.lr = 1.0 + world.rank()}), Error);
    {
      const Engine first(world, named, {}, SGD{.lr = 1});
      EXPECT_THROW(Engine(world, named, {}, SGD{.lr = 1}), Error);
    }
    Engine second(world, named, {}, SGD{.lr = 1});
    second.backward(weight.sum());
    second.step();
    EXPECT_TRUE(weight.detach().equal(at::full({3}, -1.0)));
  });
  EXPECT_THAT(texts, Each("none"));
}

// Ranks as threads: whose parameter this is, is asked while others build engines and end them. (Under make tsan, any race.)
TEST(Construction, GoesOnBesideQuestionsAboutOtherEngines) {
  at::Tensor mine = at::zeros({3}).requires_grad_();
  Engine engine(World(), NamedTensors{{"mine", mine}}, {}, SGD{});
  Engine::Impl* const owner = &engine.impl();
  std::atomic<bool> over = false;
  std::thread others([&] {
    for (int round = 1; round <= 20; ++round) {
      NamedTensors many;
      for (int i = 0; i < 40 * round; ++i) many.emplace_back(std::to_string(i), at::zeros({1}).requires_grad_());
      const Engine one(World(), many, {}, SGD{});
    }
    over = true;
  });
  int64_t wrong = 0;
  while (!over) wrong += Owners::all().of_leaf(mine) == owner ? 0 : 1;
  others.join();
  EXPECT_EQ(wrong, 0);
}

// ---- operators

TEST(Operators, DeliverToTheEngineThatOwnsTheParameterAndToNobodyWhileAGraphIsTraced) {
  const auto deliver =
      c10::Dispatcher::singleton().findSchemaOrThrow("plumb::deliver", "").typed<void(at::Tensor, const at::Tensor&)>();
  const auto end_pass = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::end_pass", "").typed<void(at::Tensor)>();
  run_local(2, [&](World world) {
    at::Tensor a = at::zeros({3}).requires_grad_(), b = at::zeros({4}).requires_grad_();
    Engine one(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1}), two(world, NamedTensors{{"b", b}}, {}, SGD{.lr = 1});
    deliver.call(a, at::full({3}, 2.0 + world.rank()));
    deliver.call(a.detach(), at::full({3}, 1.0));  // an alias of all of it
    deliver.call(b, at::full({4}, 7.0));
    end_pass.call(a);
    end_pass.call(b);
    deliver.call(at::empty({3}, at::kMeta), at::empty({3}, at::kMeta));
    end_pass.call(at::empty({3}, at::kMeta));
    one.step();
    two.step();
    EXPECT_TRUE(a.detach().equal(at::full({3}, -3.5)));
    EXPECT_TRUE(b.detach().equal(at::full({4}, -7.0)));
    for (const at::Tensor& stranger : {at::zeros({3}), a.detach().narrow(0, 0, 2), a.detach().narrow(0, 1, 2)}) {
      EXPECT_THAT([&] { deliver.call(stranger, stranger); },
                  testing::ThrowsMessage<Error>(HasSubstr("no parameter of any engine")));
    }
  });
}

}  // namespace
}  // namespace plumb

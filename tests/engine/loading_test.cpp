// What a load compares and names, what it leaves as it was, and what is left of it afterwards.
#include "engine/loading.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "engine/saving.h"
#include "save/support/folder.h"
#include "save/support/trained.h"
#include "unit/support/net.h"
#include "watch/road.h"

namespace plumb {
namespace {

using namespace test;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Saved by one engine and loaded by another: the error, which every difference is to be named in, and nothing else changes.
struct Differs {
  Options saved{}, live{};
  at::ScalarType dtype = at::kFloat;  // of the live one
  bool frozen = false;                // its first parameter
  int64_t steps = 0;
  std::string named;
};

TEST(Load, NamesWhateverDiffersAndChangesNothing) {
  const auto group = [](int count) {
    Options options;
    for (int i = 0; i < count; ++i) options.groups.push_back({[](const std::string&) { return true; }, 0.1, {}});
    return options;
  };
  const auto shares = [](int count) { return Options{.deterministic = true, .virtual_ranks = count}; };
  const Options scaled{.loss_scale = LossScale{}};
  const std::vector<Differs> all = {
      {.saved = group(1), .live = group(2), .named = "reshaped  the parameter groups  saved 1  here 2"},
      {.saved = shares(2), .live = shares(4), .named = "reshaped  virtual_ranks  saved 2  here 4"},
      {.live = scaled, .named = "missing   the loss scale"},
      {.saved = scaled, .named = "extra     the loss scale"},
      {.dtype = at::kBFloat16, .named = "reshaped  weight 'inside.w0'  saved F32 [7, 5]  here BF16 [7, 5]"},
      {.frozen = true, .steps = 2, .named = "extra     optimizer state of 'inside.w0'  saved 2 updates  here frozen"},
  };
  const Scratch scratch;
  for (const Differs& one : all) {
    Model first(3), second(5, one.dtype);
    std::string path;
    {
      Engine engine(World(), first, AdamW{}, one.saved);
      train(engine, first, one.steps);
      path = engine.save(scratch.path("all"));
    }
    if (one.frozen) second.parameters()[0].set_requires_grad(false);
    Engine engine(World(), second, AdamW{}, one.live);
    Everything before, after;
    before.add(engine);
    EXPECT_THAT([&] { engine.load(path); }, ThrowsMessage<Error>(HasSubstr(one.named)));
    after.add(engine);
    EXPECT_EQ(before.difference(after), "") << one.named;
  }
  // Shares count only where both are cut into them.
  Model first(3), second(5);
  Engine cut(World(), first, AdamW{}, shares(2)), plain(World(), second, AdamW{});
  plain.load(cut.save(scratch.path("all")));
}

TEST(RefusedLoad, AndSaveInsideOfAStepSaySoAndTheStepGoesOn) {
  const Scratch scratch;
  Model model(3);
  Engine engine(World(), model, UserOptimizer{}, {.strategy = "zero2"});
  const std::string path = engine.save(scratch.path("all"));
  engine.begin_step();  // of no backward: there are no gradients that would say it, too
  const auto inside = [](const std::string& what) {
    return ThrowsMessage<Error>(HasSubstr(what + " inside of a step; end_step() ends it"));
  };
  EXPECT_THAT([&] { engine.save(scratch.path("all")); }, inside("save()"));
  EXPECT_THAT([&] { engine.load(path); }, inside("load()"));
  EXPECT_THAT([&] { engine.load_weights(path); }, inside("load_weights()"));
  engine.end_step();
  engine.zero_grad();
  EXPECT_EQ(engine.load(engine.save(scratch.path("all"))).step, 1);
}

// Its state may be the very tensor that a load writes into.
TEST(Load, GivesAnExtraBackWhatItHadThoughItIsWrittenInPlace) {
  const Scratch scratch;
  Model model(3);
  Engine engine(World(), model, SGD{});
  const at::Tensor live = at::ones({2});
  bool refuses = false;
  const std::vector<Extra> extras = {{"first", [&] { return NamedTensors{{"value", live}}; },
                                      [&](const NamedTensors& saved) { live.copy_(saved.at(0).second); }},
                                     {"second", [] { return NamedTensors{{"value", at::ones({1})}}; },
                                      [&](const NamedTensors&) {
                                        if (refuses) throw std::runtime_error("no, thanks");
                                      }}};
  const std::string path = engine.save(scratch.path("all"), {.extras = extras});
  live.fill_(9);
  refuses = true;
  EXPECT_THROW(engine.load(path, {.extras = extras}), Error);
  EXPECT_TRUE(live.equal(at::full({2}, 9)));
  refuses = false;
  engine.load(path, {.extras = extras});
  EXPECT_TRUE(live.equal(at::ones({2})));
}

// A first step under no_sync leaves masters in buckets that the next backward makes anew, and that a step without gradients for
// all of them does not lay out again. What is loaded goes to the masters of its own parameters.
TEST(Load, ReachesMastersOfParametersThatWereInOtherBuckets) {
  const Scratch scratch;
  for (const std::string strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    for (const bool weights_alone : {true, false}) {
      std::vector<at::Tensor> parameters;
      NamedTensors named;
      for (int i = 0; i < 3; ++i) {
        parameters.push_back(at::full({5 + 8 * i}, 1.0 + i, at::kBFloat16).requires_grad_());
        named.emplace_back("p" + std::to_string(i), parameters.back());
      }
      Engine engine(World(), named, {}, AdamW{.lr = 0.1, .weight_decay = 0},
                    {.strategy = strategy, .bucket_bytes = 1, .first_bucket_bytes = 1});
      {
        const NoSync quiet(engine);
        (parameters[0].sum() + parameters[1].sum()).backward();
      }
      engine.step();
      engine.zero_grad();
      parameters[0].sum().backward();
      engine.step();
      engine.zero_grad();
      const std::string path = engine.save(scratch.path(strategy));
      std::vector<at::Tensor> saved;
      for (at::Tensor& p : parameters) saved.push_back(p.detach().clone());
      {
        at::NoGradGuard no_grad;
        for (at::Tensor& p : parameters) p.mul_(2);
      }
      engine.save(scratch.path(strategy));  // others read masters from it
      for (const Sink& sink : engine.impl().reducer->sinks()) {
        const at::Tensor master = engine.impl().updater->memory_of(sink).master;
        const at::Tensor shows = sink.parameter.detach();
        EXPECT_TRUE(!master.defined() || master.to(at::kBFloat16).equal(shows)) << strategy << sink.name;
      }
      weights_alone ? engine.load_weights(path) : engine.load(path);
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(parameters[i].equal(saved[i])) << strategy << i;
      // A step that moves everything by some tenths shows what the masters were.
      (parameters[0].sum() + parameters[1].sum() + parameters[2].sum()).backward();
      engine.step();
      for (size_t i = 0; i < 3; ++i) {
        const at::Tensor moved = saved[i].to(at::kFloat) - parameters[i].detach().to(at::kFloat);
        EXPECT_TRUE(moved.gt(0.05).logical_and(moved.lt(0.2)).all().item<bool>()) << strategy << i << moved;
      }
    }
  }
}

// Two models of one name, whose heads may differ. What does not fit begins anew, as in a new engine; the rest goes on.
TEST(Load, OfStateThatDoesNotFitBeginsItsParameterAnew) {
  struct Case {
    Optimizer before, now;
    at::ScalarType dtype_before, dtype;
    bool masters_before, masters_now, same_head, goes_on;
  };
  const AdamW adam{.lr = 0.05};
  const SGD slow{.lr = 0.05, .momentum = 0.9, .dampening = 0.6};
  const auto f64 = at::kDouble, f32 = at::kFloat, bf16 = at::kBFloat16;
  const std::vector<Case> cases = {
      {adam, adam, f64, f64, true, true, false, true},   {adam, adam, bf16, bf16, true, true, false, true},
      {slow, slow, f64, f64, true, true, false, true},   {adam, slow, f64, f64, true, true, true, false},
      {slow, adam, f64, f64, true, true, true, false},   {adam, adam, bf16, bf16, false, true, true, false},
      {adam, adam, bf16, f32, false, false, true, false}  // moments of one dtype, weights of two
  };
  const Scratch scratch;
  const auto named = [&](at::ScalarType dtype, int64_t rows, double begin) {
    return NamedTensors{{"body", at::full({6}, begin, dtype).requires_grad_()},
                        {"head", at::full({rows, 4}, begin, dtype).requires_grad_()}};
  };
  const auto step = [](Engine& engine, const NamedTensors& model) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const auto& [name, parameter] : model) loss = loss + (parameter.to(at::kDouble) * 0.25).sum();
    engine.backward(loss);
    engine.step();
    engine.zero_grad();
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& one = cases[i];
    const NamedTensors first = named(one.dtype_before, 3, 1), second = named(one.dtype, one.same_head ? 3 : 5, 2);
    Engine before(World(), first, {}, one.before, {.master_weights = one.masters_before});
    Engine now(World(), second, {}, one.now, {.master_weights = one.masters_now});
    for (int k = 0; k < 10; ++k) step(before, first);
    const LoadInfo info = now.load(before.save(scratch.path(std::to_string(i))), {.strict = false});
    EXPECT_FALSE(info.mismatches.empty()) << i;
    const at::Tensor body = second[0].second.detach().clone(), head = second[1].second.detach().clone();
    EXPECT_EQ(body.eq(first[0].second).all().item<bool>(), one.dtype == one.dtype_before) << i;
    for (const Sink& sink : now.impl().reducer->sinks()) {
      EXPECT_EQ(now.impl().updater->memory_of(sink).updates, one.goes_on && sink.name == "body" ? 10 : 0) << i;
    }
    // What a new engine does to the same values.
    const NamedTensors fresh = {{"body", body.clone().requires_grad_()}, {"head", head.clone().requires_grad_()}};
    Engine anew(World(), fresh, {}, one.now, {.master_weights = one.masters_now});
    for (int k = 0; k < 3; ++k) {
      step(now, second);
      step(anew, fresh);
      step(before, first);
      const double rounding = one.dtype == f64 ? 1e-12 : one.dtype == f32 ? 1e-6 : 1e-2;
      EXPECT_LT(distance(second[1].second, fresh[1].second), rounding) << i << ", update " << k;
      const at::Tensor& like = one.goes_on ? first[0].second : fresh[0].second;
      EXPECT_LT(distance(second[0].second, like), rounding) << i << ", update " << k;
    }
  }
}

// Every rank gives its own, and some give none: those that do hear of what they miss, and all of them of a refusal.
TEST(Load, HasExtrasThatSomeRanksAloneName) {
  const Scratch scratch;
  for (const bool saved : {false, true}) {
    for (const bool refuses : {false, true}) {
      const auto texts = errors(2, [&](World world) {
        Model model(3);
        Engine engine(world, model, SGD{});
        int loads = 0;
        const Extra extra{"cursor", [] { return NamedTensors{{"value", at::ones({1})}}; },
                          [&](const NamedTensors& state) {
                            if (refuses) throw std::runtime_error("no, thanks");
                            EXPECT_EQ(state.size(), 1u);
                            ++loads;
                          }};
        const std::string path =
            engine.save(scratch.path("all"), {.extras = saved ? std::vector{extra} : std::vector<Extra>{}});
        const bool mine = world.rank() == 1;
        const LoadInfo info =
            engine.load(path, {.strict = false, .extras = mine ? std::vector{extra} : std::vector<Extra>{}});
        EXPECT_EQ(info.mismatches.size(), mine == saved ? 0u : 1u) << "on rank " << world.rank();
        EXPECT_EQ(loads, mine && saved ? 1 : 0) << "one that is not there has nothing to load";
        train(engine, model, 1);
      });
      EXPECT_THAT(texts, Each(saved && refuses ? HasSubstr("load() failed on rank 1: no, thanks") : HasSubstr("none")));
    }
  }
}

// Its step has begun, its gradients were cleared, and one of its shares is still to come.
TEST(Load, ThatFailsBetweenTheSharesOfAStepLeavesThemAsTheyAre) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const int before : {1, 2, 3}) {
      const Scratch scratch;
      run_local(2, [&](World world) {
        SCOPED_TRACE(c10::str(strategy, ", after ", before));
        at::Tensor a = at::zeros({7}).requires_grad_(), b = at::zeros({3}).requires_grad_();
        Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1},
                      {.strategy = strategy, .deterministic = true, .virtual_ranks = 8});
        {
          at::Tensor other = at::zeros({7}).requires_grad_(), one = at::zeros({3}).requires_grad_();
          Engine writer(world, NamedTensors{{"a", other}, {"b", one}}, {}, SGD{.lr = 1}, {.strategy = strategy});
          (other.sum() + one.sum()).backward();
          writer.step();
          const std::string path = writer.save(scratch.path("all"));
          if (world.rank() == 0) {
            for (const auto& entry : std::filesystem::directory_iterator(path)) {
              if (!entry.path().filename().string().starts_with("weights")) continue;
              std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
              file.seekp(-1, std::ios::end);
              file.put('!');
            }
          }
          world.barrier();
        }
        for (int share = 0; share < before; ++share) (a.sum() + b.sum()).backward();
        engine.zero_grad();
        EXPECT_THAT([&] { engine.load(scratch.path("all")); }, ThrowsMessage<Error>(HasSubstr("checksum")));
        for (int share = before; share < 4; ++share) ((a.sum() + b.sum()) * (1 + 2 * world.rank())).backward();
        engine.step();
        EXPECT_TRUE(engine.full_parameter(a).eq(-2.0 * (4 - before)).all().item<bool>()) << engine.full_parameter(a);
        EXPECT_TRUE(engine.full_parameter(b).eq(-2.0 * (4 - before)).all().item<bool>()) << engine.full_parameter(b);
      });
    }
  }
}

TEST(Load, ReadsEveryByteThoughItIsOfARankThatIsNoMore) {
  const Scratch scratch;
  std::string path;
  run_local(2, [&](World world) {
    Model model(3);
    Engine engine(world, model, SGD{});
    const std::string saved = engine.save(scratch.path("all"));
    if (world.rank() == 0) path = saved;
  });
  Model model(3);
  Engine engine(World(), model, SGD{});
  engine.load(path);
  {
    std::fstream file(path + "/rest-00001-of-00002.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('!');
    ASSERT_TRUE(file.good()) << "its generator's state";
  }
  EXPECT_THAT([&] { engine.load(path); }, ThrowsMessage<Error>(HasSubstr("checksum")));
}

// A weight of another shape, larger or smaller, or of another dtype.
TEST(Load, LeavesWhatDoesNotFitAsItWas) {
  const Scratch scratch;
  const std::vector<at::Tensor> others = {at::ones({5, 4}), at::ones({2, 4}), at::ones({4, 3}),
                                          at::ones({3, 4}, at::kBFloat16), at::ones({3, 4}, at::kDouble)};
  at::Tensor weight = at::full({3, 4}, 2.0).requires_grad_(), other = at::full({3}, 5.0).requires_grad_();
  Engine first(World(), NamedTensors{{"w", weight}, {"other", other}}, {{"b", at::full({3, 4}, 7.0)}}, SGD{});
  const std::string path = first.save(scratch.path("all"));
  for (const at::Tensor& one : others) {
    at::Tensor mine = one.clone().requires_grad_(), same = at::zeros({3}).requires_grad_(), buffer = one.clone();
    Engine engine(World(), NamedTensors{{"w", mine}, {"other", same}}, {{"b", buffer}}, SGD{});
    const LoadInfo info = engine.load(path, {.strict = false});
    EXPECT_EQ(info.mismatches.size(), 2u) << info.table();
    EXPECT_TRUE(mine.equal(one) && buffer.equal(one)) << one.options() << one.sizes();
    EXPECT_TRUE(same.equal(other)) << "what fits";
  }
}

// Shares are of deterministic runs: what another one's options say of them means nothing.
TEST(Load, OfARunThatHadNoSharesTakesAnyNumberOfThem) {
  const Scratch scratch;
  Model first(3);
  Engine engine(World(), first, SGD{});
  const std::string path = engine.save(scratch.path("all"));
  for (const int shares : {1, 2, 4}) {
    Model second(4);
    Engine other(World(), second, SGD{}, {.deterministic = true, .virtual_ranks = shares});
    EXPECT_TRUE(other.load(path).mismatches.empty()) << shares;
    EXPECT_TRUE(second.parameters()[0].equal(first.parameters()[0]));
  }
}

// More ranks than saved: each of the new ones draws numbers of its own, the same whenever this is loaded.
TEST(Load, GivesEveryNewRankAGeneratorOfItsOwn) {
  const Scratch scratch;
  const at::Tensor state = at::arange(20, at::kByte);
  {
    Model model(3);
    Engine engine(World(), model, SGD{});
    engine.impl().saving = std::make_shared<Saving>(engine.impl());
    engine.impl().saving->begin(scratch.path("all"), {}, nullptr, Copy::no, {{"another", state}});
    engine.impl().saving->finish();
  }
  std::array<uint64_t, 4> seeds{};
  run_local(4, [&](World world) {
    Model model(3);
    Engine engine(world, model, SGD{});
    for (int turn = 0; turn < 2; ++turn) {
      const Loading loading(engine.impl(), scratch.path("all"), {}, OuterState::none);
      ASSERT_EQ(loading.outer_generators().size(), 1u);
      const Loading::Generator& one = loading.outer_generators()[0];
      EXPECT_EQ(one.name, "another");
      ASSERT_EQ(one.state.defined(), world.rank() == 0);
      EXPECT_TRUE(!one.state.defined() || one.state.equal(state));
      uint64_t& seed = seeds[static_cast<size_t>(world.rank())];
      EXPECT_TRUE(turn == 0 || one.seed == seed);
      seed = one.seed;
    }
  });
  EXPECT_EQ(std::set<uint64_t>(seeds.begin() + 1, seeds.end()).size(), 3u);
}

TEST(Load, OfWeightsThatStandInTwoFilesIsRefused) {
  const Scratch scratch;
  Model model(3);
  Engine engine(World(), model, SGD{});
  const std::string weights = engine.save(scratch.path("all")) + "/weights-00000-of-00001.safetensors";
  std::filesystem::create_directory(scratch.path("plain"));
  std::filesystem::copy_file(weights, scratch.path("plain/one.safetensors"));
  EXPECT_NO_THROW(engine.load_weights(scratch.path("plain"), {.strict = false}));
  std::filesystem::copy_file(weights, scratch.path("plain/two.safetensors"));
  EXPECT_THAT([&] { engine.load_weights(scratch.path("plain"), {.strict = false}); },
              ThrowsMessage<Error>(HasSubstr("tensor 'inside.w0' stands in two files of")));
}

// What was computed with the old values cannot be differentiated with the new ones.
TEST(Load, AGraphFromBeforeItIsAnErrorAsOfAnyChange) {
  for (const std::string strategy : {"ddp", "zero1", "zero3"}) {
    const Scratch scratch;
    const auto texts = errors(2, [&](World world) {
      scenarios::Alike net(3);
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = strategy});
      const std::string path = engine.save(scratch.path("all"));
      at::Tensor h = torch::ones({2, 6});
      for (auto& layer : net.layers) h = torch::tanh(layer->forward(h));
      engine.load(path);
      h.sum().backward();
    });
    EXPECT_THAT(texts, Each(HasSubstr("modified by an inplace operation"))) << strategy;
  }
}

// One that failed is not mistaken for the one before, and nobody is seen to write any more.
TEST(RefusedSave, LeavesNoPathAndNobodyWriting) {
  const Scratch scratch;
  Model model(3);
  Engine engine(World(), model, SGD{});
  const Road& road = road_of(engine.world());
  EXPECT_EQ(engine.finish_save(), "");
  engine.save_in_background(scratch.path("all"));
  EXPECT_NE(engine.finish_save(), "");
  EXPECT_EQ(road.last().beside, Point::none);
  scratch.write("file", "no folder");
  EXPECT_THROW(engine.save(scratch.path("file")), Error);
  EXPECT_EQ(engine.finish_save(), "") << "the path of another one";
  EXPECT_EQ(road.last().beside, Point::none);
}

// Parameters may be parts of one memory, alike but for where they begin; a delivery may name one by an alias.
TEST(Deliveries, ToAnAliasReachThatOneOfTwoParametersInOneMemory) {
  const at::Tensor memory = at::zeros({8});
  std::vector<at::Tensor> both;
  for (const int64_t begin : {0, 4}) both.push_back(memory.narrow(0, begin, 4).detach().requires_grad_());
  Engine engine(World(), NamedTensors{{"first", both[0]}, {"second", both[1]}}, {}, SGD{.lr = 1});
  const auto deliver =
      c10::Dispatcher::singleton().findSchemaOrThrow("plumb::deliver", "").typed<void(at::Tensor, const at::Tensor&)>();
  for (size_t i = 0; i < 2; ++i) deliver.call(both[i].detach(), at::full({4}, static_cast<double>(i + 1)));
  engine.end_pass();
  engine.step();
  EXPECT_TRUE(both[0].detach().equal(at::full({4}, -1.0)));
  EXPECT_TRUE(both[1].detach().equal(at::full({4}, -2.0)));
}

// Updates that a parameter is too coarse to show gather in its master: a run that begins again does not go on with them.
TEST(Load, OfACheckpointBeforeTheFirstUpdateForgetsWhatMastersGathered) {
  const Scratch scratch;
  for (const std::string strategy : {"ddp", "zero1", "zero3"}) {
    run_local(2, [&](World world) {
      at::Tensor weight = at::ones({40}, at::kBFloat16).requires_grad_();
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{.lr = 1.5e-4}, {.strategy = strategy});
      const std::string path = engine.save(scratch.path(strategy));
      for (int run = 0; run < 3; ++run) {
        for (int step = 0; step < 10; ++step) {  // less than half of what it can show
          weight.to(at::kFloat).sum().backward();
          engine.step();
          engine.zero_grad();
        }
        EXPECT_TRUE(weight.eq(1).all().item<bool>()) << strategy << ", run " << run;
        engine.load(path);
      }
    });
  }
}

}  // namespace
}  // namespace plumb

// Models built in parts: each rank keeps its own, and an engine makes whole what it needs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "errors.h"
#include "unit/deferred.h"
#include "unit/storage.h"
#include "unit/support/net.h"

namespace plumb {
namespace {

using namespace test;

TEST(Deferred, BuildsTheValuesOfAnUnshardedModelInParts) {
  Net plain;
  for (const char* strategy : {"ddp", "zero2", "zero3", "hsdp"}) {
    run_local(3, [&](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      std::unique_ptr<Net> net;
      {
        Deferred deferred(world);
        net = std::make_unique<Net>();
        EXPECT_ANY_THROW((net->first->up->weight + 1).sum().item<float>());
      }
      lock.unlock();
      Engine engine(world, *net, SGD{.lr = 0.1}, {.strategy = strategy});
      const auto parameters = net->parameters();
      const auto expected = plain.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(engine.full_parameter(parameters[i]).equal(expected[i])) << strategy << " " << i;
      }
      net->forward(torch::ones({1, 6})).sum().backward();
      engine.step();
    });
  }
}

// Whatever is left over when a length is divided: nothing, one, all but one; also fewer elements than ranks.
TEST(Deferred, BuildsEveryLengthOnEveryWorld) {
  struct Lengths : torch::nn::Module {
    Lengths() {
      for (int64_t length = 0; length <= 9; ++length) {
        register_parameter("p" + std::to_string(length), torch::arange(length, at::kFloat) + 1);
      }
      register_parameter("turned", (torch::arange(15, at::kFloat) + 1).view({3, 5}).t());
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  const Lengths plain;
  for (const int ranks : {1, 2, 3, 4, 5}) {
    for (const char* strategy : {"ddp", "zero3"}) {
      run_local(ranks, [&](World world) {
        struct Holder : torch::nn::Module {
          Holder() { unit = register_module("unit", std::make_shared<Lengths>()); }
          Unit<Lengths> unit{nullptr};
        };
        std::unique_ptr<Holder> holder;
        {
          const Deferred deferred(world);
          holder = std::make_unique<Holder>();
        }
        Engine engine(world, *holder, SGD{.lr = 0.1}, {.strategy = strategy});
        const auto found = holder->parameters(), expected = plain.parameters();
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(engine.full_parameter(found[i]).equal(expected[i])) << strategy << " on " << ranks << ", " << i;
        }
      });
    }
  }
}

TEST(Deferred, RanksThatSeedDifferentlyAreAnError) {
  try {
    run_local(2, [](World world) {
      static std::mutex building;
      std::unique_lock lock(building);
      torch::manual_seed(world.rank());
      Deferred deferred(world);
      Unit<torch::nn::Linear> linear(torch::nn::Linear(3, 4));
      lock.unlock();
      Engine engine(world, *linear.ptr(), SGD{.lr = 0.1}, {.strategy = "zero3"});
    });
    ADD_FAILURE() << "different values went through";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("seed the generator alike"));
  }
}

// In whichever element, wherever it lies.
TEST(Deferred, OneElementThatDiffersIsAnError) {
  struct One : torch::nn::Module {
    explicit One(int64_t which) {
      at::Tensor values = torch::ones({37});
      if (which >= 0) values[which] += 0x1p-20;
      register_parameter("weight", values);
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  for (const int64_t which : {0, 18, 36}) {
    const auto texts = errors(2, [&](World world) {
      const Deferred deferred(world);
      const Unit<One> unit(std::make_shared<One>(world.rank() == 1 ? which : -1));
      auto model = std::make_shared<torch::nn::Module>("model");
      model->register_module("unit", unit.ptr());
      Engine engine(world, *model, SGD{.lr = 0.1}, {.strategy = "zero3"});
    });
    EXPECT_THAT(texts, testing::Each(testing::AllOf(testing::HasSubstr("different values of the deferred parameter"),
                                                    testing::HasSubstr("'unit.weight'"))))
        << which;
  }
}

// The inner scope ends, and the outer goes on.
TEST(Deferred, ScopesMayLieInsideEachOther) {
  run_local(2, [](World world) {
    static std::mutex building;
    std::unique_lock lock(building);
    torch::manual_seed(3);
    const Deferred outer(world);
    {
      const Deferred inner(world);
    }
    const Unit<torch::nn::Linear> nothing{
        std::shared_ptr<torch::nn::LinearImpl>()};  // a place for one that comes later
    EXPECT_TRUE(nothing.is_empty());
    const Unit<torch::nn::Linear> cut{torch::nn::Linear(4, 4)};
    EXPECT_ANY_THROW(cut->weight.sum()) << "it was built in parts";
  });
}

// One parameter of two units is cut once.
TEST(Deferred, BuildsAParameterOfTwoUnits) {
  struct Holder : torch::nn::Module {
    explicit Holder(const at::Tensor& value) : weight(register_parameter("weight", value)) {}
    at::Tensor forward(const at::Tensor& x) { return x * weight; }
    at::Tensor weight;
  };
  struct Tied : torch::nn::Module {
    Tied() {
      const at::Tensor value = torch::arange(6, at::kFloat) + 1;
      one = register_module("one", std::make_shared<Holder>(value));
      other = register_module("other", std::make_shared<Holder>(value));
    }
    Unit<Holder> one{nullptr}, other{nullptr};
  };
  for (const char* strategy : {"ddp", "zero3"}) {
    run_local(2, [&](World world) {
      std::unique_ptr<Tied> tied;
      {
        const Deferred deferred(world);
        tied = std::make_unique<Tied>();
      }
      Engine engine(world, *tied, SGD{.lr = 1}, {.strategy = strategy});
      EXPECT_TRUE(engine.full_parameter(tied->other->weight).equal(torch::arange(6, at::kFloat) + 1));
      tied->other->forward(tied->one->forward(torch::ones({6}))).sum().backward();
      engine.step();
      EXPECT_TRUE(engine.full_parameter(tied->one->weight).equal(-torch::arange(6, at::kFloat) - 1));
    });
  }
}

// ---- parameters of which each rank has its own rows

// As torch.chunk cuts them: the last ranks may get fewer, or none.
at::Tensor rows_of(const at::Tensor& whole, int rank, int ranks) {
  const auto chunks = whole.chunk(ranks);
  return static_cast<size_t>(rank) < chunks.size() ? chunks[rank] : whole.narrow(0, 0, 0);
}

struct Rows {
  explicit Rows(uint64_t seed) {
    static std::mutex building;
    const std::lock_guard lock(building);
    torch::manual_seed(seed);
    net = std::make_unique<scenarios::Alike>(2);
    for (const at::Tensor& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  }
  at::Tensor forward(at::Tensor h) const {
    for (auto& layer : net->layers) h = torch::tanh(layer->forward(h));
    return h;
  }
  std::unique_ptr<scenarios::Alike> net;
  std::vector<at::Tensor> values;
};

// Six rows for one to four ranks, so that cuts are even, uneven, and leave a rank without; replicas take the first one's.
TEST(RowsKept, ByEachRankAreItsShardAndTogetherTheParameter) {
  for (const int replicas : {1, 2}) {
    for (const int ranks : {1, 2, 3, 4}) {
      if (ranks == 1 && replicas > 1) continue;
      run_local(ranks * replicas, [&](World world) {
        SCOPED_TRACE(c10::str(ranks, " ranks, ", replicas, " replicas"));
        const int rank = world.rank() % ranks, replica = world.rank() / ranks;
        const Rows rows(7);
        const auto parameters = rows.net->parameters();
        if (ranks > 1) {
          for (size_t i = 0; i < parameters.size(); ++i) {
            const at::Tensor mine = rows_of(rows.values[i], rank, ranks);
            deferred::keep_rows(parameters[i], replica == 0 ? mine.clone() : at::full_like(mine, 77), world.rank());
            EXPECT_TRUE(deferred::waits(parameters[i]));
            EXPECT_THAT([&] { parameters[i].sum(); },
                        testing::Throws<std::exception>(testing::Property(
                            &std::exception::what,
                            testing::AllOf(testing::HasSubstr("build the plumb::Engine first"),
                                           testing::HasSubstr(c10::str("plumb: rank ", world.rank(), ":"))))));
          }
        }
        Engine engine(world, *rows.net, SGD{.lr = 0.1},
                      {.strategy = replicas > 1 ? "hsdp" : "zero3", .mesh = {replicas, ranks}, .cut = Cut::at_rows});
        std::map<std::string, at::Tensor> wanted;
        size_t i = 0;
        for (const auto& item : rows.net->named_parameters()) wanted[item.key()] = rows.values[i++];
        for (const auto& [name, shard] : engine.shards()) {
          EXPECT_TRUE(shard.equal(rows_of(wanted.at(name), rank, ranks).flatten())) << name;
        }
        for (size_t p = 0; p < parameters.size(); ++p) {
          EXPECT_FALSE(deferred::waits(parameters[p]));
          EXPECT_TRUE(engine.full_parameter(parameters[p]).equal(rows.values[p])) << p;
        }
        // And they train as whole ones do.
        const Rows twin(7);
        for (const Rows* one : {&rows, &twin}) one->forward(torch::ones({2, 6})).sum().backward();
        engine.step();
        const auto plain = twin.net->parameters();
        for (size_t p = 0; p < parameters.size(); ++p) {
          EXPECT_TRUE(engine.full_parameter(parameters[p]).allclose(plain[p] - 0.1 * plain[p].grad(), 1e-5, 1e-6)) << p;
        }
      });
    }
  }
}

TEST(RowsKept, MayBeReplacedUntilTheEngineComesAndGoWithTheirParameter) {
  at::Tensor parameter = torch::ones({4, 3}).requires_grad_();
  deferred::keep_rows(parameter, torch::ones({2, 3}), 0);
  deferred::keep_rows(parameter, torch::full({1, 3}, 2.0), 0);
  EXPECT_TRUE(deferred::take_rows(parameter).equal(torch::full({3}, 2.0)));
  EXPECT_FALSE(deferred::take_rows(parameter).defined()) << "taken once";
  EXPECT_FALSE(deferred::waits(parameter));
  EXPECT_FALSE(deferred::take_rows(torch::ones({2})).defined());
}

// In a unit beside whole ones, or outside of all units; wherever it stands in its bucket.
TEST(RowsKept, AreRefusedByAnEngineThatDoesNotCutThere) {
  for (const char* strategy : {"ddp", "zero2", "zero3"}) {
    for (const Cut cut : {Cut::anywhere, Cut::at_parameters}) {
      for (const size_t which : {0, 1}) {
        const auto texts = errors(2, [&](World world) {
          const Rows rows(7);
          const at::Tensor parameter = rows.net->parameters()[which];
          deferred::keep_rows(parameter, rows_of(rows.values[which], world.rank(), 2).clone(), world.rank());
          Engine engine(world, *rows.net, SGD{.lr = 0.1}, {.strategy = strategy, .cut = cut});
        });
        EXPECT_THAT(texts, testing::Each(testing::HasSubstr("was cut by rows, and its engine does not"))) << strategy;
      }
    }
  }
}

TEST(RowsKept, MoreThanARanksPartAreRefused) {
  const auto texts = errors(2, [](World world) {
    const Rows rows(7);
    for (const at::Tensor& parameter : rows.net->parameters()) {
      deferred::keep_rows(parameter, torch::ones(parameter.sizes()), world.rank());
    }
    Engine engine(world, *rows.net, SGD{.lr = 0.1}, {.strategy = "zero3", .cut = Cut::at_rows});
  });
  EXPECT_THAT(texts, testing::Each(testing::HasSubstr("was cut by rows, and its engine does not")));
}

}  // namespace
}  // namespace plumb

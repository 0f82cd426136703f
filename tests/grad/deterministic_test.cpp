// Deterministic mode: the same bits on every number of ranks and in every strategy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "plumb/plumb.h"
#include "scenarios/support/models.h"

namespace plumb {
namespace {

constexpr int kShares = 8;

at::Tensor share(int step, int index) {
  auto generator = at::detail::createCPUGenerator(1000 * step + index);
  return at::randn({5, 6}, generator);
}

std::shared_ptr<scenarios::Net> net() {
  static std::mutex building;
  std::lock_guard lock(building);
  torch::manual_seed(11);
  return std::make_shared<scenarios::Net>();
}

Options options(const std::string& strategy) {
  Options all;
  all.strategy = strategy;
  all.deterministic = true;
  all.virtual_ranks = kShares;
  all.clip_norm = 0.1;
  all.bucket_bytes = 300;
  all.first_bucket_bytes = 100;
  return all;
}

std::vector<at::Tensor> train(const std::string& strategy, int ranks, const Options& settings) {
  std::vector<at::Tensor> result;
  run_local(ranks, [&](World world) {
    at::set_num_threads(1);
    const auto model = net();
    Engine engine(world, *model, AdamW{.lr = 0.02}, settings);
    const int mine = settings.virtual_ranks / ranks;
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < mine; ++i) {
        const auto x = share(step, world.rank() * mine + i);
        // Some shares leave parameters out.
        const auto loss = (world.rank() * mine + i) % 3 == 0 ? model->loss_left(x) : model->loss(x);
        (loss / mine).backward();
      }
      engine.step();
      if (step != 1) engine.zero_grad();
    }
    std::vector<at::Tensor> whole;
    for (const auto& p : model->parameters()) whole.push_back(engine.full_parameter(p));
    if (world.rank() == 0) result = whole;
  });
  (void)strategy;
  return result;
}

TEST(Deterministic, GivesTheSameBitsOnEveryWorldInEveryStrategy) {
  const auto expected = train("ddp", 1, options("ddp"));
  for (const Strategy& row : strategies()) {
    for (int ranks : {1, 2, 4, 8}) {
      const auto found = train(row.name, ranks, options(row.name));
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(found[i].equal(expected[i])) << row.name << " on " << ranks << " ranks, parameter " << i;
      }
    }
  }
}

TEST(Deterministic, IsCloseToTheUsualMode) {
  const auto expected = train("ddp", 1, options("ddp"));
  Options usual = options("zero2");
  usual.deterministic = false;
  const auto found = train("zero2", 2, usual);
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-3, 1e-4));
}

TEST(Deterministic, AMeshOfTwoAxesGivesTheSameBits) {
  const auto expected = train("ddp", 1, options("ddp"));
  for (const Mesh& mesh : {Mesh{2, 2}, Mesh{4, 1}, Mesh{1, 4}}) {
    Options all = options("zero2");
    all.mesh = mesh;
    const auto found = train("zero2", 4, all);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << mesh.replicate;
  }
}

TEST(Deterministic, WorldsThatCannotShareEvenlyAreRefused) {
  for (const auto& [ranks, shares] : {std::pair{3, 8}, {4, 6}, {2, 5}, {3, 12}, {2, 0}}) {
    Options all = options("ddp");
    all.virtual_ranks = shares;
    try {
      train("ddp", ranks, all);
      ADD_FAILURE() << ranks << " ranks shared " << shares;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("cannot share evenly"));
    }
  }
}

TEST(Deterministic, AStepWithTheWrongNumberOfBackwardsIsAnError) {
  run_local(2, [](World world) {
    const auto model = net();
    Engine engine(world, *model, AdamW{}, options("zero2"));
    model->loss(share(0, world.rank())).backward();
    try {
      engine.step();
      ADD_FAILURE() << "one backward counted as four";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("expected 4"));
    }
  });
}

// The sums of a step's shares are elsewhere until step(): a change of .grad would be lost.
TEST(Deterministic, AGradientChangedAfterTheLastShareIsAnError) {
  run_local(2, [](World world) {
    at::Tensor a = at::zeros({5}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{.lr = 1.0}, {.deterministic = true, .virtual_ranks = 2});
    a.sum().backward();
    a.mutable_grad().mul_(0.5);
    try {
      engine.step();
      ADD_FAILURE() << "a change was lost in silence";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("Options::clip_norm"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace plumb

// An optimizer of the user's own over this rank's pieces, against libtorch's over whole parameters in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <map>
#include <mutex>

#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    block = register_module("block", std::make_shared<torch::nn::LinearImpl>(7, 3));
    spare = register_module("spare", torch::nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return block->forward(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, spare{nullptr};
  Unit<torch::nn::Linear> block{nullptr};
};

std::shared_ptr<NetImpl> make_net() {
  static std::mutex seeding;  // the generator is the process's, and ranks are its threads
  const std::lock_guard lock(seeding);
  torch::manual_seed(3);
  auto net = std::make_shared<NetImpl>();
  net->to(at::kDouble);
  return net;
}

at::Tensor input(int rank, int step) {
  return torch::randn({4, 5}, at::detail::createCPUGenerator(10 * rank + step + 1), at::kDouble);
}

class Pieces : public testing::TestWithParam<std::string> {};

TEST_P(Pieces, SteppedByTheUserAreTheStepOfOneProcess) {
  const int ranks = 2;
  run_local(ranks, [&](World world) {
    const auto net = make_net(), twin = make_net();
    torch::optim::AdamW whole(twin->parameters(), torch::optim::AdamWOptions(0.05).weight_decay(0.1));
    Engine engine(world, *net, UserOptimizer{}, {.strategy = GetParam()});
    std::map<const void*, at::Tensor> leaves;  // by parameter: his optimizer knows them by identity
    std::unique_ptr<torch::optim::AdamW> his;
    for (int step = 0; step < 4; ++step) {
      net->forward(input(world.rank(), step)).square().mean().backward();
      EXPECT_FALSE(engine.begin_step().skipped);
      std::vector<at::Tensor> all;
      for (const Piece& piece : engine.pieces()) {
        at::Tensor& leaf = leaves[piece.parameter.unsafeGetTensorImpl()];
        if (!leaf.defined()) leaf = piece.weight.detach();
        EXPECT_EQ(leaf.const_data_ptr(), piece.weight.const_data_ptr());
        EXPECT_LE(piece.begin + piece.weight.numel(), piece.parameter.numel());
        leaf.mutable_grad() = piece.gradient;
        all.push_back(leaf);
      }
      if (!his) his = std::make_unique<torch::optim::AdamW>(all, torch::optim::AdamWOptions(0.05).weight_decay(0.1));
      his->step();
      engine.end_step();
      engine.zero_grad();
      for (int rank = 0; rank < ranks; ++rank) (twin->forward(input(rank, step)).square().mean() / ranks).backward();
      whole.step();
      twin->zero_grad();
    }
    const auto mine = net->parameters(), others = twin->parameters();
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(torch::allclose(engine.full_parameter(mine[i]), others[i], 1e-11, 1e-12)) << i;
    }
  });
}

TEST_P(Pieces, OfABf16ParameterAreItsMaster) {
  run_local(2, [&](World world) {
    auto net = make_net();
    net->to(at::kBFloat16);
    Engine engine(world, *net, UserOptimizer{}, {.strategy = GetParam()});
    for (int step = 0; step < 8; ++step) {
      net->first->weight.sum().backward();
      engine.begin_step();
      for (const Piece& piece : engine.pieces()) {
        if (!piece.gradient.defined()) continue;
        EXPECT_EQ(piece.weight.scalar_type(), at::kFloat);
        EXPECT_EQ(piece.gradient.scalar_type(), at::kFloat);
        at::Tensor weight = piece.weight;
        weight.sub_(piece.gradient, 1e-4);  // less than a bf16 of this size can show in one step
      }
      engine.end_step();
      engine.zero_grad();
    }
    auto expected = make_net();
    expected->to(at::kBFloat16);
    const at::Tensor exact = expected->first->weight.detach().to(at::kFloat) - 8e-4;
    EXPECT_TRUE(torch::allclose(engine.full_parameter(net->first->weight), exact.to(at::kBFloat16)));
  });
}

// On every rank and in every unit: the master of each piece goes back to where the parameter's part lies.
TEST_P(Pieces, OfBf16ParametersGoBackToTheirPlaces) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_local(ranks, [&](World world) {
      auto net = make_net(), before = make_net();
      for (const auto& one : {net, before}) one->to(at::kBFloat16);
      Engine engine(world, *net, UserOptimizer{}, {.strategy = GetParam()});
      at::Tensor loss = torch::zeros({});
      for (const at::Tensor& parameter : net->first->parameters()) loss = loss + parameter.sum();
      (loss + net->block->forward(torch::ones({1, 7}, at::kBFloat16)).sum()).backward();
      engine.begin_step();
      for (const Piece& piece : engine.pieces()) {
        if (!piece.gradient.defined()) continue;
        at::Tensor(piece.weight).copy_(torch::arange(piece.weight.numel()) + piece.begin + 1);
      }
      engine.end_step();
      const auto found = net->named_parameters(), old = before->named_parameters();
      for (const auto& item : found) {
        const at::Tensor& parameter = item.value();
        const at::Tensor expected = item.key().starts_with("spare")
                                        ? old[item.key()].detach()
                                        : (torch::arange(parameter.numel()) + 1).view(parameter.sizes());
        EXPECT_TRUE(engine.full_parameter(parameter).to(at::kFloat).equal(expected.to(at::kFloat)))
            << item.key() << " on " << ranks;
      }
    });
  }
}

// Only what cannot hold an update by itself has a master beside it.
TEST_P(Pieces, OfWideParametersAreTheParametersThemselves) {
  run_local(2, [&](World world) {
    auto net = make_net();
    Engine engine(world, *net, UserOptimizer{}, {.strategy = GetParam()});
    net->forward(input(0, 0)).sum().backward();
    engine.begin_step();
    for (const Piece& piece : engine.pieces()) {
      const bool in_unit = piece.parameter.is_same(net->block->weight) || piece.parameter.is_same(net->block->bias);
      if (in_unit || !piece.gradient.defined() || piece.weight.numel() == 0) continue;
      const auto* whole = piece.parameter.const_data_ptr<double>();
      EXPECT_EQ(piece.weight.const_data_ptr<double>(), whole + piece.begin);
    }
    engine.end_step();
  });
}

// Cut at parameters, each is one rank's, or one of each replica's: an update may look at all of it.
TEST_P(Pieces, CutAtParametersAreWholeAndHaveOneOwner) {
  for (const int ranks : {2, 3}) {
    std::mutex mutex;
    std::map<std::string, int> owners;
    run_local(ranks, [&](World world) {
      const auto net = make_net(), twin = make_net();
      Engine engine(world, *net, UserOptimizer{}, {.strategy = GetParam(), .cut = Cut::at_parameters});
      std::map<const void*, std::string> names;
      for (const auto& item : net->named_parameters()) names[item.value().unsafeGetTensorImpl()] = item.key();
      const auto towards = [](const at::Tensor& gradient) { return gradient / gradient.norm(); };
      for (int step = 0; step < 2; ++step) {
        net->forward(input(world.rank(), step)).square().mean().backward();
        engine.begin_step();
        for (const Piece& piece : engine.pieces()) {
          if (!piece.gradient.defined() || piece.weight.numel() == 0) continue;
          EXPECT_EQ(piece.begin, 0);
          EXPECT_EQ(piece.weight.numel(), piece.parameter.numel());
          at::Tensor(piece.weight).sub_(towards(piece.gradient), 0.1);
          const std::lock_guard lock(mutex);
          if (step == 0) ++owners[names.at(piece.parameter.unsafeGetTensorImpl())];
        }
        engine.end_step();
        engine.zero_grad();
        for (int rank = 0; rank < ranks; ++rank) (twin->forward(input(rank, step)).square().mean() / ranks).backward();
        at::NoGradGuard no_grad;
        for (at::Tensor& parameter : twin->parameters()) {
          if (parameter.grad().defined()) parameter.sub_(towards(parameter.grad()), 0.1);
        }
        twin->zero_grad();
      }
      const auto mine = net->parameters(), others = twin->parameters();
      for (size_t i = 0; i < mine.size(); ++i) {
        EXPECT_TRUE(torch::allclose(engine.full_parameter(mine[i]), others[i], 1e-11, 1e-12)) << i;
      }
    });
    ASSERT_EQ(owners.size(), 4U);
    const int each = GetParam() == "ddp" || (GetParam() == "hsdp" && ranks == 2) ? ranks : 1;
    for (const auto& [name, count] : owners) EXPECT_EQ(count, each) << name << " on " << ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(InEveryStrategy, Pieces, testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                         [](const auto& info) { return info.param; });

TEST(UsersOptimizer, StepsInThreeAndNobodyElseDoes) {
  const auto net = make_net();
  Engine engine(World(), *net, UserOptimizer{});
  EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<Error>(HasSubstr("begin_step()")));
  EXPECT_THAT([&] { engine.pieces(); }, ThrowsMessage<Error>(HasSubstr("begin_step() first")));
  EXPECT_THAT([&] { engine.end_step(); }, ThrowsMessage<Error>(HasSubstr("without begin_step()")));
  const auto other = make_net();
  Engine ours(World(), *other, SGD{});
  EXPECT_THAT([&] { ours.begin_step(); }, ThrowsMessage<Error>(HasSubstr("call step()")));
}

}  // namespace
}  // namespace plumb

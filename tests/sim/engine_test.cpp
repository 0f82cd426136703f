// The engine on the simulated accelerator: the bits of the same training on the CPU, and no race.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "plumb/engine.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

// Three steps of two backwards each; the parameters of this rank.
at::Tensor train_with_engine(const World& world, const at::Device& where) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(6, 16), torch::nn::GELU(), torch::nn::Linear(16, 16),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})), torch::nn::Linear(16, 2));
  model->to(where);
  Options options;
  options.bucket_bytes = 1024;
  options.first_bucket_bytes = 256;
  options.clip_norm = 0.5;
  Engine engine(world, *model, AdamW{.lr = 1e-2}, options);
  torch::manual_seed(100 + world.rank());
  for (int step = 0; step < 3; ++step) {
    const Scope scope("step " + std::to_string(step));
    for (int pass = 0; pass < 2; ++pass) {
      const at::Tensor x = torch::randn({4, 6}).to(where);
      model->forward(x).square().mean().backward();
    }
    engine.step();
    engine.zero_grad();
  }
  std::vector<at::Tensor> flat;
  for (const auto& parameter : model->parameters()) flat.push_back(parameter.detach().reshape({-1}));
  return torch::cat(flat).cpu();
}

TEST(Engine, TrainsOnTheSimulatorToTheBitsOfTheCpuWithoutARace) {
  // Ranks are threads with one generator there, so they take turns here.
  std::vector<at::Tensor> expected(2);
  {
    Session session(0);
    const Communicator communicator(2);
    run_ranks(2, [&](int rank) {
      expected[rank] = train_with_engine(World::adopt(communicator.backend(rank), nullptr), at::kCPU);
    });
  }
  EXPECT_TRUE(same_bits(expected[0], expected[1]));
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Session session(seed);
    const Communicator communicator(2);
    std::vector<at::Tensor> found(2);
    run_ranks(2, [&](int rank) {
      found[rank] = train_with_engine(World::adopt(communicator.backend(rank), nullptr), device(rank));
    });
    for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(same_bits(found[rank], expected[rank])) << "seed " << seed;
    EXPECT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

}  // namespace
}  // namespace plumb::sim

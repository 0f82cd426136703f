// The smallest loop: `build/bin/example_smallest` for one rank, and for two
// `torchrun --no-python --nproc-per-node 2 build/bin/example_smallest`.
//
// Three lines make it data-parallel: the world, the engine, engine.step(). The rest is plain libtorch.
#include <plumb/plumb.h>
#include <torch/torch.h>

#include <cstdio>

int main() try {
  plumb::World world = plumb::World::join();

  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  plumb::Engine engine(world, *model, plumb::AdamW{.lr = 1e-2});

  torch::manual_seed(1 + world.rank());  // every rank sees samples of its own
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({64, 8});
    const auto y = torch::tanh(x.sum(1, /*keepdim=*/true));
    const auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    engine.step();
    engine.zero_grad();
    if (world.rank() == 0 && step % 40 == 39) std::printf("step %3d  loss %.4f\n", step + 1, loss.item<double>());
  }
} catch (const plumb::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

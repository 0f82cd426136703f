// Four micro-batches per step: `build/bin/example_accumulate`, or on two ranks
// `torchrun --no-python --nproc-per-node 2 build/bin/example_accumulate`.
//
// The first three backwards stay on their rank (no_sync); the last one reduces the sum. Without no_sync the result is
// the same, with four times the traffic.
#include <plumb/plumb.h>
#include <torch/torch.h>

#include <cstdio>

int main() try {
  plumb::World world = plumb::World::join();

  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  plumb::Options options;
  options.clip_norm = 1.0;
  plumb::Engine engine(world, *model, plumb::AdamW{.lr = 1e-2}, options);

  torch::manual_seed(1 + world.rank());
  constexpr int kMicro = 4;
  for (int step = 0; step < 200; ++step) {
    double sum = 0.0;
    for (int i = 0; i < kMicro; ++i) {
      const auto x = torch::randn({16, 8});
      const auto loss = torch::mse_loss(model->forward(x), torch::tanh(x.sum(1, /*keepdim=*/true))) / kMicro;
      if (i + 1 < kMicro) {
        const auto local = engine.no_sync();
        loss.backward();
      } else {
        loss.backward();
      }
      sum += loss.item<double>();
    }
    const plumb::StepInfo info = engine.step();
    engine.zero_grad();
    if (world.rank() == 0 && step % 40 == 39) {
      std::printf("step %3d  loss %.4f  norm %.3f\n", step + 1, sum, info.grad_norm.item<double>());
    }
  }
} catch (const plumb::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

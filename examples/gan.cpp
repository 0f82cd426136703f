// A GAN with two engines in one world: `build/bin/example_gan`, or on two ranks
// `torchrun --no-python --nproc-per-node 2 build/bin/example_gan`.
//
// The generator's loss runs backwards through the discriminator too. Those gradients are real contributions to the
// discriminator's parameters, and not wanted there: freezing them for the generator's turn says so.
#include <plumb/plumb.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

void trainable(torch::nn::Module& module, bool yes) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(yes);
}

at::Tensor judge(torch::nn::Sequential& judge, const at::Tensor& points, double truth) {
  const auto verdict = judge->forward(points);
  return torch::binary_cross_entropy_with_logits(verdict, torch::full_like(verdict, truth));
}

}  // namespace

int main() try {
  plumb::World world = plumb::World::join();

  torch::manual_seed(0);
  torch::nn::Sequential generator(torch::nn::Linear(4, 32), torch::nn::ReLU(), torch::nn::Linear(32, 2));
  torch::nn::Sequential discriminator(torch::nn::Linear(2, 32), torch::nn::LeakyReLU(), torch::nn::Linear(32, 1));
  plumb::Engine make(world, *generator, plumb::AdamW{.lr = 2e-3, .beta1 = 0.5});
  plumb::Engine tell(world, *discriminator, plumb::AdamW{.lr = 2e-3, .beta1 = 0.5});

  torch::manual_seed(1 + world.rank());
  for (int step = 0; step < 400; ++step) {
    const auto real = torch::randn({64, 2}) * 0.2 + torch::tensor({2.0f, -1.0f});  // what is to be imitated
    const auto fake = generator->forward(torch::randn({64, 4}));

    const auto told = judge(discriminator, real, 1.0) + judge(discriminator, fake.detach(), 0.0);
    told.backward();
    tell.step();
    tell.zero_grad();

    trainable(*discriminator, false);
    const auto fooled = judge(discriminator, fake, 1.0);
    fooled.backward();
    make.step();
    make.zero_grad();
    trainable(*discriminator, true);

    if (world.rank() == 0 && step % 80 == 79) {
      const auto centre = fake.mean(0);
      std::printf("step %3d  discriminator %.3f  generator %.3f  centre (%.2f, %.2f), wanted (2, -1)\n", step + 1,
                  told.item<double>(), fooled.item<double>(), centre[0].item<double>(), centre[1].item<double>());
    }
  }
} catch (const plumb::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

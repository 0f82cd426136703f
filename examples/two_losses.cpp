// Two losses over one graph: `build/bin/example_two_losses`, or on two ranks
// `torchrun --no-python --nproc-per-node 2 build/bin/example_two_losses`.
//
// The trunk is computed once and walked backwards twice, through two heads. Each backward is a pass of its own; the
// gradients add up, and nothing but loss.backward() is called. A head that a pass does not reach needs no flag.
#include <plumb/plumb.h>
#include <torch/torch.h>

#include <cstdio>

struct TwoHeads : torch::nn::Module {
  TwoHeads() {
    trunk = register_module("trunk", torch::nn::Linear(8, 64));
    size = register_module("size", torch::nn::Linear(64, 1));
    sign = register_module("sign", torch::nn::Linear(64, 2));
  }
  torch::nn::Linear trunk{nullptr}, size{nullptr}, sign{nullptr};
};

int main() try {
  plumb::World world = plumb::World::join();

  torch::manual_seed(0);
  TwoHeads model;
  plumb::Engine engine(world, model, plumb::AdamW{.lr = 1e-2});

  torch::manual_seed(1 + world.rank());
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({64, 8});
    const auto features = torch::tanh(model.trunk(x));

    const auto regression = torch::mse_loss(model.size(features).squeeze(1), torch::tanh(x.sum(1)));
    const auto classification =
        torch::nn::functional::cross_entropy(model.sign(features), (x.sum(1) > 0).to(torch::kLong));

    regression.backward({}, /*retain_graph=*/true);
    classification.backward();
    engine.step();
    engine.zero_grad();
    if (world.rank() == 0 && step % 40 == 39) {
      std::printf("step %3d  regression %.4f  classification %.4f\n", step + 1, regression.item<double>(),
                  classification.item<double>());
    }
  }
} catch (const plumb::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

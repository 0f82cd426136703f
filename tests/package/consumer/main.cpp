// A user's program: two ranks train a small model through the installed package, and end with the same parameters.
#include <plumb/plumb.h>
#include <torch/torch.h>

#include <cstdio>
#include <vector>

int main() {
  std::vector<torch::Tensor> weights(2);
  plumb::run_local(2, [&](plumb::World world) {
    torch::nn::Linear model(4, 2);
    plumb::Engine engine(world, *model, plumb::SGD{.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      model(torch::full({8, 4}, 1.0 + world.rank())).pow(2).mean().backward();
      engine.step();
      engine.zero_grad();
    }
    weights[world.rank()] = model->weight.detach().clone();
  });
  if (!torch::equal(weights[0], weights[1])) return 1;
  std::puts("consumer: 2 ranks agree");
}

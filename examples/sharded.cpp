// A model whose blocks are sharded over the ranks: parameters, gradients and optimizer state.
//
//   build/bin/example_sharded                                             one rank: everything is whole
//   torchrun --no-python --nproc-per-node 2 build/bin/example_sharded     each rank keeps half
#include <plumb/plumb.h>
#include <torch/torch.h>

#include <cstdio>

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) {
    for (int i = 0; i < 4; ++i) blocks.emplace_back(register_module("block" + std::to_string(i), Block(width)));
    head = register_module("head", torch::nn::Linear(width, 1));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);  // whole for this expression
    return head(x);
  }
  std::vector<plumb::Unit<Block>> blocks;  // without sharding: std::vector<Block>
  torch::nn::Linear head{nullptr};         // of no unit: always whole
};
TORCH_MODULE(Net);

int main() try {
  plumb::World world = plumb::World::join();
  torch::manual_seed(1);
  Net net(64);
  plumb::Engine engine(world, *net, plumb::AdamW{.lr = 1e-3}, {.strategy = "zero3", .clip_norm = 1.0});

  torch::manual_seed(100 + world.rank());
  for (int step = 0; step < 100; ++step) {
    const auto x = torch::randn({32, 64});
    const auto loss = at::mse_loss(net->forward(x), x.sum(1, true) / 8);
    loss.backward({}, /*keep_graph=*/true);
    loss.backward();  // the same graph again: its parameters are gathered again
    const plumb::StepInfo info = engine.step();
    engine.zero_grad();
    if (step % 20 == 0 && world.rank() == 0) {
      std::printf("step %3d  loss %.4f  gradient norm %.4f\n", step, loss.item<double>(),
                  info.grad_norm.item<double>());
    }
  }
  const at::Tensor whole = engine.full_parameter(net->parameters()[0]);  // on every rank
  if (world.rank() == 0) std::printf("block0.up.weight has norm %.4f\n", whole.norm().item<double>());
} catch (const plumb::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

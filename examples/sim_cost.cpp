// Times a training step on the simulated accelerator against the CPU, in turns, one thread: build/bin/example_sim_cost
#include <plumb/sim.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace sim = plumb::sim;

struct Trainer {
  Trainer(int64_t width, const torch::Device& device)
      : model(torch::nn::Linear(width, width), torch::nn::GELU(), torch::nn::Linear(width, width), torch::nn::ReLU(),
              torch::nn::Linear(width, width)),
        x(torch::randn({64, width})), y(torch::randn({64, width})) {
    model->to(device);
    x = x.to(device);
    y = y.to(device);
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.01);
  }
  // Ends with the loss on the host, as a training loop that prints does.
  double milliseconds_per_step(int steps) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      optimizer->zero_grad();
      const auto loss = torch::mse_loss(model->forward(x), y);
      loss.backward();
      optimizer->step();
      if (i + 1 == steps) (void)loss.item<float>();
    }
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin;
    return passed.count() / steps;
  }
  torch::nn::Sequential model;
  torch::Tensor x, y;
  std::unique_ptr<torch::optim::SGD> optimizer;
};

int main() {
  at::set_num_threads(1);
  sim::init(1);
  std::printf("width   cpu ms   sim ms   ratio\n");
  for (const int64_t width : {32, 64, 256, 1024}) {
    const int steps = width >= 1024 ? 5 : 30;
    sim::Session session(0);
    Trainer cpu(width, torch::kCPU), simulated(width, sim::device(0));
    std::vector<double> on_cpu, on_sim, ratios;
    for (int round = 0; round < 21; ++round) {
      on_cpu.push_back(cpu.milliseconds_per_step(steps));
      on_sim.push_back(simulated.milliseconds_per_step(steps));
      ratios.push_back(on_sim.back() / on_cpu.back());
    }
    const auto median = [](std::vector<double>& v) {
      std::sort(v.begin(), v.end());
      return v[v.size() / 2];
    };
    std::printf("%5ld %8.3f %8.3f %7.2f\n", static_cast<long>(width), median(on_cpu), median(on_sim), median(ratios));
  }
}

// An engine of your own on the simulated accelerator: build/bin/example_sim_engine
//
// Two ranks train under a side stream and step under the main one, in 20 orders. Prints what was found: nothing.
#include <plumb/plumb.h>
#include <plumb/sim.h>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <iostream>

namespace sim = plumb::sim;

int main() {
  sim::init(2);
  for (const std::string strategy : {"ddp", "zero2"}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      sim::Session session(seed);
      sim::run_world(2, [&](plumb::World world) {
        const int rank = world.rank();
        torch::manual_seed(1);
        torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Linear(64, 1));
        model->to(sim::device(rank));
        plumb::Engine engine(world, *model, plumb::AdamW{.lr = 1e-2}, {.strategy = strategy, .clip_norm = 1.0});

        const c10::Stream side = sim::new_stream(rank, "training");
        sim::wait_for(side, sim::current_stream(rank));  // the model was made under the main stream
        for (int step = 0; step < 3; ++step) {
          {
            const sim::Scope scope("backward of step " + std::to_string(step));
            const c10::StreamGuard guard(side);
            model->forward(torch::randn({8, 16}, sim::device(rank))).square().mean().backward();
          }
          const sim::Scope scope("step " + std::to_string(step));
          engine.step();
          engine.zero_grad();
        }
      });
      session.finish();
      if (session.races().empty()) continue;
      std::cout << strategy << ", seed " << seed << "\n" << session.report();
      return 1;
    }
    std::cout << strategy << ": 20 orders, no race\n";
  }
}

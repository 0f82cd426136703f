// Finds a race in ordinary stream code, on a machine without an accelerator: build/bin/example_sim_race
//
// The program normalises a batch on a side stream while the main stream already uses it. On a GPU it fails once in a
// while; here it is reported on every run, with both operations and the wait that is missing.
#include <c10/core/StreamGuard.h>
#include <plumb/sim.h>
#include <torch/torch.h>

#include <iostream>

namespace sim = plumb::sim;

float normalised_sum(bool wait) {
  const auto main = sim::current_stream(0);
  const auto side = sim::new_stream(0, "prefetch");
  auto batch = torch::arange(8, torch::device(sim::device(0)).dtype(torch::kFloat));
  sim::name(batch, "batch");
  sim::wait_for(side, main);
  {
    sim::Scope scope("normalise");
    c10::StreamGuard guard(side);
    batch.div_(7);
  }
  if (wait) sim::wait_for(main, side);
  sim::Scope scope("forward");
  return batch.sum().item<float>();
}

int main() {
  sim::init(1);
  for (const bool wait : {true, false}) {
    std::cout << (wait ? "with" : "without") << " the wait\n";
    for (uint64_t seed = 0; seed < 8; ++seed) {
      sim::Session session(seed);
      const float sum = normalised_sum(wait);
      std::cout << "  seed " << seed << ": sum " << sum << ", races " << session.races().size() << "\n";
      if (seed == 7) std::cout << session.report();
    }
  }
}

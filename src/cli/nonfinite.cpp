#include "cli/nonfinite.h"

#include <cmath>

#include "cli/origin.h"
#include "engine/not_finite.h"
#include "engine/slots.h"
#include "world/group.h"

namespace plumb::cli {

std::vector<at::Tensor> generator_states() {
  std::vector<at::Tensor> states;
  for (at::Generator& generator : saved_generators()) {
    std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state().clone());
  }
  return states;
}

void set_generators(const std::vector<at::Tensor>& states) {
  std::vector<at::Generator> generators = saved_generators();
  for (size_t i = 0; i < std::min(states.size(), generators.size()); ++i) {
    std::lock_guard lock(generators[i].mutex());
    generators[i].set_state(states[i]);
  }
}

std::string loss_not_finite(int64_t step, int64_t micro, int rank) {
  return "step " + std::to_string(step) + ": the loss of micro-batch " + std::to_string(micro) + " on rank " +
         std::to_string(rank) + " is not finite (--nonfinite error)";
}

void check_losses(const World& world, const std::vector<double>& losses, int64_t step) {
  int64_t first = -1;
  for (size_t i = losses.size(); i-- > 0;) {
    if (!std::isfinite(losses[i])) first = static_cast<int64_t>(i);
  }
  const Where where{.kind = Where::Kind::step, .step = step, .pass = 0, .detail = "losses that are not finite"};
  const auto all = exchange(world, std::span(&first, 1), where);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][0] < 0) continue;
    throw NotFinite(world.rank(), loss_not_finite(step, all[rank][0], static_cast<int>(rank)));
  }
}

std::string trace_origin(Engine& engine, Job& job, const std::vector<model::Batch>& batches,
                         const std::vector<at::Tensor>& generators, int64_t step) {
  engine.zero_grad();
  set_generators(generators);
  std::string mine;
  for (size_t i = 0; i < batches.size(); ++i) {
    const OriginWatch watch;
    job.run(batches[i], static_cast<int64_t>(i));
    if (mine.empty() && !watch.found().empty()) mine = "micro-batch " + std::to_string(i) + ": " + watch.found();
  }
  const Where where{.kind = Where::Kind::step, .step = step, .pass = 0, .detail = "the origin of what is not finite"};
  const auto all = exchange_text(engine.world(), mine, where);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return "it began on rank " + std::to_string(rank) + " in " + all[rank];
  }
  return "run again, no operation of any rank made one: it came about when gradients were summed, or not in the same "
         "way";
}

}  // namespace plumb::cli

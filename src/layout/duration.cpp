#include "layout/duration.h"

#include <algorithm>
#include <bit>

namespace plumb {

int64_t control_rounds(int64_t ranks) {
  if (ranks < 2) return 0;
  const auto count = static_cast<uint64_t>(ranks);
  return std::bit_width(count) - 1 + (std::has_single_bit(count) ? 0 : 2);
}

Duration duration(const ModelShape& model, const Plan& plan, const Link& link, const Load& load) {
  const int64_t shards = plan.mesh.shard, replicas = plan.mesh.replicate, ranks = shards * replicas;
  const auto sharded = [&](Placement placement) { return placement == Placement::sharded && shards > 1; };
  const auto sent = [&](double bytes, int64_t among) {
    return bytes * static_cast<double>(among - 1) / static_cast<double>(among) / link.bytes_per_second;
  };
  const auto rounds = [&](int64_t count) { return static_cast<double>(count) * link.latency; };
  const auto params = static_cast<double>(model.params());
  const auto in_units = sharded(plan.row.parameter) ? params - static_cast<double>(model.others) : 0.0;
  const auto backwards = static_cast<double>(plan.backwards), reductions = static_cast<double>(plan.reductions);
  const double gradient_bytes = params * static_cast<double>(plan.recipe.gradient);
  const double unit_bytes = in_units * static_cast<double>(plan.recipe.parameter);

  Duration result;
  const double forward = 2 * params * load.tokens / load.flops, backward = 2 * forward;
  result.compute = backwards * (forward + backward);
  const double message = rounds(control_rounds(ranks));

  // One reduction of all gradients: bytes take turns, latencies overlap.
  double bytes = 0, latency = 0;
  if (ranks > 1 && sharded(plan.row.gradient)) {
    bytes = sent(gradient_bytes, shards) + 2 * sent(gradient_bytes / static_cast<double>(shards), replicas);
    latency = rounds(1 + 2 * (replicas - 1));
  } else if (ranks > 1) {
    bytes = 2 * sent(gradient_bytes, ranks);
    latency = rounds(2 * (ranks - 1));
  }
  // The last bucket is complete when the backward ends.
  const double last =
      bytes * std::min(1.0, static_cast<double>(plan.bucket_bytes) / std::max(1.0, gradient_bytes)) + latency;

  // Units: the first of a forward is waited for; a backward finds what the window kept.
  double gather_forward = 0, gather_backward = 0, first = 0;
  if (in_units > 0) {
    gather_forward = sent(unit_bytes, shards) + rounds(1);
    const double regathered = std::max(0.0, unit_bytes - static_cast<double>(load.gather_ahead_bytes));
    gather_backward = regathered > 0 ? sent(regathered, shards) + rounds(1) : 0;
    first = sent(static_cast<double>(model.units.front() * plan.recipe.parameter), shards) + rounds(1);
  }
  const double in_forward = std::max(first, gather_forward - forward);
  const auto in_backward = [&](double reduced, double tail) {
    const double exposed = std::max(reduced + gather_backward - backward, tail);
    return tail > 0 || reduced > 0 ? std::max(exposed, message) : std::max(exposed, 0.0);  // facts travel beside
  };

  // Updated parameters that stay whole.
  const double updated = sharded(plan.row.state)
                             ? sent((params - in_units) * static_cast<double>(plan.recipe.parameter), shards) +
                                   (params > in_units ? rounds(shards - 1) : 0)
                             : 0;
  result.data = reductions * (bytes + latency) + updated;
  result.gathers = backwards * (gather_forward + gather_backward);
  result.control = (reductions + 1) * message;
  result.exposed = backwards * in_forward + reductions * in_backward(bytes + latency, last) +
                   (backwards - reductions) * in_backward(0, 0) + updated + message;
  result.step = result.compute + result.exposed;
  return result;
}

}  // namespace plumb

#include "layout/duration.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "layout/at_a_time.h"

namespace plumb {
namespace {

double one_way(double bytes, int64_t ranks) {
  return bytes * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
}

int64_t turns_of(int64_t messages, int64_t at_a_time) {
  return messages > 0 ? (messages + at_a_time - 1) / at_a_time : 0;
}

int64_t ceil_of(double amount, double each) { return static_cast<int64_t>((amount + each - 1) / each); }

// The bytes of each bucket: a unit is one where parameters are sharded; others fill buckets up to the cap.
std::vector<int64_t> buckets(const ModelShape& model, const Plan& plan, bool by_unit) {
  std::vector<int64_t> sizes;
  if (by_unit) {
    for (const int64_t unit : model.units) sizes.push_back(unit * plan.recipe.gradient);
  }
  int64_t rest = (by_unit ? model.others : model.params()) * plan.recipe.gradient;
  for (; rest > 0; rest -= std::min(rest, plan.bucket_bytes)) sizes.push_back(std::min(rest, plan.bucket_bytes));
  return sizes;
}

// Small neighbours travel as one message where messages are dear.
std::vector<int64_t> joined(const std::vector<int64_t>& buckets) {
  std::vector<int64_t> messages;
  for (const int64_t bucket : buckets) {
    const bool fits = !messages.empty() && messages.back() + bucket <= kTogether;
    if (fits) {
      messages.back() += bucket;
    } else {
      messages.push_back(bucket);
    }
  }
  return messages;
}

}  // namespace

Messages messages_of(const ModelShape& model, const Plan& plan, const Load& load, Carriage carriage) {
  const int64_t shards = plan.mesh.shard, replicas = plan.mesh.replicate, ranks = shards * replicas;
  const auto sharded = [&](Placement placement) { return placement == Placement::sharded && shards > 1; };
  Messages result;
  if (ranks < 2) return result;
  const auto params = static_cast<double>(model.params());
  const double in_units = sharded(plan.row.parameter) ? params - static_cast<double>(model.others) : 0.0;
  result.control_rounds = rounds_of_control(ranks);

  std::vector<int64_t> messages = buckets(model, plan, in_units > 0);
  const auto units = in_units > 0 ? static_cast<int64_t>(model.units.size()) : 0;
  const int64_t whole_buckets = static_cast<int64_t>(messages.size()) - units;
  if (messages.empty()) return result;
  const bool scattered = sharded(plan.row.gradient);
  result.turns = 1;
  if (scattered) {
    // What is outside of units is collected from the start, and goes beside the last of them.
    std::vector<int64_t> queue(messages.begin(), units > 0 ? messages.begin() + units : messages.end());
    if (carriage != Carriage::ring) {
      messages = joined(messages);
      queue = joined(queue);
    }
    result.turns = turns_of(static_cast<int64_t>(queue.size()), kScatteredAtATime);
    result.crossing_turns = turns_of(static_cast<int64_t>(queue.size()), kCrossingAtATime);
    result.crossing_rounds = rounds_around(carriage, 2, replicas);
    result.reduction_rounds = rounds_around(carriage, 1, shards) + result.crossing_rounds;
    if (load.norm) result.norm_rounds = rounds_around(carriage, 2, shards);
  } else {
    result.reduction_rounds = rounds_around(carriage, 2, ranks);
  }
  const auto sent = [&](double bytes) {
    if (!scattered) return 2 * one_way(bytes, ranks);
    return one_way(bytes, shards) + 2 * one_way(bytes / static_cast<double>(shards), replicas);
  };
  result.reductions = static_cast<int64_t>(messages.size());
  result.reduction_bytes = sent(params * static_cast<double>(plan.recipe.gradient));
  result.last_bytes = sent(static_cast<double>(messages.back()));

  if (sharded(plan.row.state) && params > in_units) {
    result.updates = whole_buckets;
    result.updated_rounds = rounds_around(carriage, 1, shards);
    result.updated_bytes = one_way((params - in_units) * static_cast<double>(plan.recipe.parameter), shards);
  }
  if (in_units > 0) {
    const auto whole = [&](double count) { return count * static_cast<double>(plan.recipe.parameter); };
    // A backward finds what the window kept, the unit used last at least.
    const double window =
        std::max(static_cast<double>(load.gather_ahead_bytes), whole(static_cast<double>(model.units.back())));
    const double again = std::max(0.0, whole(in_units) - window);
    result.forward_bytes = one_way(whole(in_units), shards);
    result.backward_bytes = one_way(again, shards);
    result.first_bytes = one_way(whole(static_cast<double>(model.units.front())), shards);
    result.forward_windows = ceil_of(whole(in_units), window);
    result.backward_windows = ceil_of(again, window);
  }
  return result;
}

Duration duration(const ModelShape& model, const Plan& plan, const Link& link, const Load& load) {
  const Messages t = messages_of(model, plan, load, link.carriage);
  const auto taken = [&](double bytes, int64_t rounds) {
    return bytes / link.bytes_per_second + static_cast<double>(rounds) * link.latency;
  };
  const auto backwards = static_cast<double>(plan.backwards), reductions = static_cast<double>(plan.reductions);
  Duration result;
  const double forward = 2 * static_cast<double>(model.params()) * load.tokens / load.flops, backward = 2 * forward;
  result.compute = backwards * (forward + backward);
  const double message = taken(0, t.control_rounds);

  // Bytes take turns; latencies overlap, as many as are on their way at a time. The last message begins when the backward
  // ends, and facts travel beside it.
  const int64_t across = t.crossing_rounds, inside = t.reduction_rounds - across;
  const int64_t rounds = std::max(t.turns * inside + across, inside + t.crossing_turns * across);
  const double reduced = taken(t.reduction_bytes, rounds);
  const double last = taken(t.last_bytes, t.reduction_rounds);

  // The first unit of a forward is waited for.
  const double gather_forward = taken(t.forward_bytes, t.forward_windows);
  const double gather_backward = taken(t.backward_bytes, t.backward_windows);
  const double first = t.forward_windows > 0 ? taken(t.first_bytes, 1) : 0;
  const double in_forward = std::max(first, gather_forward - forward);
  const double beside_last = std::max(0.0, reduced - last + gather_backward - backward);
  const double in_reduced = beside_last + std::max(last, message);
  const double in_held = std::max(0.0, gather_backward - backward);

  const double updated = taken(t.updated_bytes, turns_of(t.updates, kUpdatesAtATime) * t.updated_rounds);
  const double norm = taken(0, t.norm_rounds);
  result.data = reductions * reduced + updated + norm;
  result.gathers = backwards * (gather_forward + gather_backward);
  result.control = (reductions + 1) * message;
  result.exposed =
      backwards * in_forward + reductions * in_reduced + (backwards - reductions) * in_held + updated + norm + message;
  result.step = result.compute + result.exposed;
  result.data_rounds =
      plan.reductions * t.reductions * t.reduction_rounds + t.updates * t.updated_rounds + t.norm_rounds;
  result.control_rounds = (plan.reductions + 1) * t.control_rounds;
  return result;
}

}  // namespace plumb

// The arithmetic of memory and messages, placement by placement.
#include "layout/estimate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace plumb {
namespace {

// What a ring sends per rank to give everybody (or to sum into one owner each) `bytes` in all.
double one_way(double bytes, int ranks) { return bytes * (ranks - 1) / ranks; }

int64_t part(int64_t count, int shards) { return (count + shards - 1) / shards; }

}  // namespace

int64_t ModelShape::params() const { return std::accumulate(units.begin(), units.end(), others); }

Estimate estimate(const ModelShape& model, const Plan& plan) {
  const int shards = plan.mesh.shard;
  const int replicas = plan.mesh.replicate;
  const auto sharded = [&](Placement placement) { return placement == Placement::sharded && shards > 1; };
  const auto cut = [&](Placement placement) { return sharded(placement) ? shards : 1; };
  const Recipe& recipe = plan.recipe;
  const int64_t params = model.params();
  const int64_t in_units = sharded(plan.row.parameter) ? params - model.others : 0;
  const int64_t whole = params - in_units;
  const int64_t largest_unit = model.units.empty() ? 0 : *std::max_element(model.units.begin(), model.units.end());

  Estimate result;
  result.parameters = (whole + part(in_units, shards)) * recipe.parameter;
  result.gradients = part(params, cut(plan.row.gradient)) * recipe.gradient;
  result.state = part(params, cut(plan.row.state)) * recipe.state;

  if (in_units > 0) result.gathered = largest_unit * recipe.parameter;
  if (sharded(plan.row.gradient)) {
    // A unit is one bucket; parameters outside of units fill buckets up to the cap, or have one alone.
    const int64_t capped = std::max(plan.bucket_bytes, model.largest * recipe.gradient);
    const int64_t bucket = in_units > 0 ? largest_unit * recipe.gradient : std::min(capped, params * recipe.gradient);
    result.buckets = std::min(2 * bucket, params * recipe.gradient);
  }

  const auto gradient_bytes = static_cast<double>(params * recipe.gradient);
  // Where gradients are sharded: summed into the shards, and each shard over the replicas.
  const double reduction = sharded(plan.row.gradient)
                               ? one_way(gradient_bytes, shards) + 2 * one_way(gradient_bytes / shards, replicas)
                               : 2 * one_way(gradient_bytes, shards * replicas);
  double wire = reduction * static_cast<double>(plan.reductions);
  if (sharded(plan.row.state)) wire += one_way(static_cast<double>(whole * recipe.parameter), shards);
  // Units are gathered for each forward and for each backward.
  wire += 2 * one_way(static_cast<double>(in_units * recipe.parameter), shards) * static_cast<double>(plan.backwards);
  result.wire = std::llround(wire);
  return result;
}

}  // namespace plumb

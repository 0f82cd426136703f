// Estimate: what a rank will hold and send, told before anything runs. Pure arithmetic, no tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "plumb/strategy.h"

namespace plumb {

// A model as the estimate sees it, in numbers of parameters.
struct ModelShape {
  std::vector<int64_t> units;  // of each plumb::Unit
  int64_t others = 0;          // outside all units
  int64_t largest = 0;         // of one parameter
  int64_t params() const;
};

// Bytes per parameter.
struct Recipe {
  int64_t parameter = 4;
  int64_t gradient = 4;  // of its sum, which is also what travels
  int64_t state = 8;     // of the optimizer, master weights included
};
inline constexpr Recipe kFloat32{4, 4, 8};  // AdamW's two moments
inline constexpr Recipe kHalf{2, 4, 12};    // bf16 or f16: gradients summed in f32; f32 master weights

struct Plan {
  Strategy row;
  Mesh mesh;  // as mesh_of gives it
  Recipe recipe;
  int64_t bucket_bytes = 4 << 20;
  // Of one step, on each rank.
  int64_t backwards = 1;
  // How often gradients travel in a step: once, or after each backward (sharded gradients, unless told otherwise).
  int64_t reductions = 1;
};

// Bytes of one rank. Without what only tiny models notice, the padding of buckets and up to two spare buffers of 1 MiB for
// sharded gradients, and without activations.
struct Estimate {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t state = 0;
  int64_t held() const { return parameters + gradients + state; }  // after a step, until gradients are cleared

  // For a while inside a step.
  int64_t gathered = 0;  // the largest unit, made whole
  int64_t buckets = 0;   // whole gradients on their way into their shards: two at a time

  int64_t wire = 0;  // sent by a rank in a step
};

Estimate estimate(const ModelShape& model, const Plan& plan);

}  // namespace plumb

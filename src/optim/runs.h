// Runs: the stretches of a bucket that take part in a step, so that kernels see few large tensors, not many small ones.
#pragma once

#include <functional>
#include <vector>

#include "grad/bucket.h"

namespace plumb {

struct Run {
  int64_t begin = 0;  // in elements of the bucket
  int64_t end = 0;
  const Sink* first = nullptr;  // stands for all of them
};

// Neighbouring parameters with a gradient that are `alike` make one run, cut to what lies `within`. Padding between them
// belongs to it: it is zero in gradient, parameter and state, and stays zero.
std::vector<Run> runs_of(const Bucket& bucket, const Range& within,
                         const std::function<bool(const Sink&, const Sink&)>& alike);

// The part of a flat tensor that a run covers, as real numbers. `covers`: what the tensor holds of the bucket.
at::Tensor part(const at::Tensor& flat, const Range& covers, const Run& run);

}  // namespace plumb

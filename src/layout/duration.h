// Duration: how long a step takes over given links, told before anything runs. Pure arithmetic; docs/scale.md has the formula.
#pragma once

#include "layout/estimate.h"

namespace plumb {

// Between any two ranks; each rank sends with all of its bandwidth.
struct Link {
  double latency = 0;               // seconds
  double bytes_per_second = 1e300;  // of one rank
};

// What a rank computes with, and on.
struct Load {
  double flops = 1e300;  // floating-point operations per second
  double tokens = 1;     // of one micro-batch; 6 operations per parameter and token, 2 of them in the forward
  int64_t gather_ahead_bytes = 16 << 20;
};

// Seconds of one step.
struct Duration {
  double compute = 0;
  double data = 0;     // gradients and updated parameters on their way, hidden or not
  double gathers = 0;  // parameters of units, hidden or not
  double control = 0;  // host messages, hidden or not
  double exposed = 0;  // of all these: what no computation hides
  double step = 0;     // compute + exposed
};

// Rounds of one host message among so many ranks.
int64_t control_rounds(int64_t ranks);

Duration duration(const ModelShape& model, const Plan& plan, const Link& link, const Load& load);

}  // namespace plumb

// Duration: how long a step takes over given links, told before anything runs. Pure arithmetic; docs/scale.md has the formula.
#pragma once

#include "backend/rounds.h"
#include "layout/estimate.h"

namespace plumb {

// Between any two ranks; each rank sends with all of its bandwidth.
struct Link {
  double latency = 0;               // seconds
  double bytes_per_second = 1e300;  // of one rank
  Carriage carriage = Carriage::direct;
};

// What a rank computes with, and on.
struct Load {
  double flops = 1e300;  // floating-point operations per second
  double tokens = 1;     // of one micro-batch; 6 operations per parameter and token, 2 of them in the forward
  int64_t gather_ahead_bytes = 16 << 20;
  bool norm = false;  // of the gradients is taken at each step, to be clipped
};

// What a rank does of each kind: in a step, or where it says so, each time.
struct Messages {
  int64_t control_rounds = 0;    // of one host message: one in each pass that reduces, one in a step
  int64_t reduction_rounds = 0;  // of one bucket
  int64_t crossing_rounds = 0;   // of these: between replicas, beside the next buckets' others
  int64_t reductions = 0;        // messages of one reduction of all gradients
  int64_t turns = 0;             // in which they go, those of a turn beside each other
  int64_t crossing_turns = 0;    // and those between replicas
  int64_t updates = 0;           // messages of parameters that stay whole while their state is sharded
  int64_t updated_rounds = 0;    // of one of them
  int64_t norm_rounds = 0;
  double reduction_bytes = 0;  // of one reduction of all gradients
  double last_bytes = 0;       // of its last message
  double updated_bytes = 0;
  double forward_bytes = 0, backward_bytes = 0;  // gathers of units, of one forward and one backward
  double first_bytes = 0;                        // of the first unit
  int64_t forward_windows = 0, backward_windows = 0;
};
Messages messages_of(const ModelShape& model, const Plan& plan, const Load& load, Carriage carriage);

// Seconds of one step.
struct Duration {
  double compute = 0;
  double data = 0;     // gradients and updated parameters on their way, hidden or not
  double gathers = 0;  // parameters of units, hidden or not
  double control = 0;  // host messages, hidden or not
  double exposed = 0;  // of all these: what no computation hides
  double step = 0;     // compute + exposed
  // Counted one after the other, however many are on their way at a time.
  int64_t data_rounds = 0, control_rounds = 0;
};
Duration duration(const ModelShape& model, const Plan& plan, const Link& link, const Load& load);

}  // namespace plumb

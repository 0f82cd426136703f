// Bucket: a flat run of parameters whose gradients are reduced as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "grad/sink.h"
#include "lane/lane.h"
#include "layout/layout.h"
#include "world/group.h"

namespace plumb {

struct Bucket {
  int index = -1;
  std::vector<Sink*> sinks;  // in the order they lie in memory
  at::Tensor gradient;       // flat, with padding that stays zero
  at::Tensor parameter;      // flat, the same places; undefined until an optimizer wants it
  Producers producers;       // whoever wrote `gradient` since the last reduction

  // The state of this pass.
  int waiting = 0;        // sinks whose gradient is still expected
  bool launched = false;  // the reduction has begun
  bool late = false;      // a gradient came after that: reduce once more when the backward has ended
  Pending reduction;
};

}  // namespace plumb

// Bucket: a flat run of parameters whose gradients are reduced as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "grad/sink.h"
#include "lane/lane.h"
#include "layout/layout.h"
#include "world/group.h"

namespace plumb {

struct Bucket {
  int index = -1;
  int unit = -1;                      // the unit whose parameters these are; -1: parameters that are always whole
  std::vector<Sink*> sinks;           // in the order they lie in memory
  at::ScalarType dtype = at::kFloat;  // of the gradient: the widest that a member's rule asks for
  int64_t numel = 0;                  // of all of them, with padding that stays zero
  Range kept;            // of the reduced gradient: this rank's part where gradients are sharded, otherwise all of it
  Range updated;         // by this rank's optimizer: its part where the state is sharded, otherwise all of it
  Range held;            // of the parameters: this rank's part where they are sharded, otherwise all of them
  at::Tensor gradient;   // the reduced gradient, `kept` of it; sharded: made when the first one comes
  at::Tensor parameter;  // flat, `held` of them; undefined until somebody wants it
  Lanes lanes;           // of `gradient`, `incoming`, `arriving`, `shares`, and of the optimizer's state

  // Where gradients are not summed in place: what this pass has contributed, from its first gradient to its reduction.
  at::Tensor incoming;
  at::Tensor lent;                 // the memory it lies in
  at::Tensor arriving;             // the reduction of it, when it is to be added to `gradient`
  std::vector<at::Tensor> shares;  // deterministic mode: partial sums of this step's passes, as a binary tree

  int convoy = -1;    // buckets of one convoy are reduced together
  bool alone = true;  // in messages of its own

  // The state of this pass.
  int waiting = 0;        // sinks whose gradient is still expected
  bool launched = false;  // the reduction has begun
  bool late = false;      // a gradient came after that: reduce once more when the backward has ended
  bool under_way = false;
  std::shared_ptr<Pending> reduction;

  // Where the reduction of `incoming` arrives.
  const at::Tensor& target() const { return arriving.defined() ? arriving : gradient; }
  c10::Device device() const { return sinks[0]->parameter.device(); }
  bool has_gradient() const {
    return std::any_of(sinks.begin(), sinks.end(), [](const Sink* sink) { return sink->grad().defined(); });
  }
  int64_t after(size_t sink) const { return sink + 1 < sinks.size() ? sinks[sink + 1]->slot.offset : numel; }
};

}  // namespace plumb

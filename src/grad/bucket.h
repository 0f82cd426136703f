// Bucket: a flat run of parameters whose gradients are reduced as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "grad/sink.h"
#include "lane/lane.h"
#include "layout/layout.h"
#include "world/group.h"

namespace plumb {

// What contributions are collected in where they are not summed in place, from a pass's first gradient to its reduction.
struct Incoming {
  at::Tensor sum;                  // of this pass: whole gradients, one behind the other
  at::Tensor memory;               // that it lies in
  at::Tensor arriving;             // the reduction of it, when it is to be added to the gradient
  std::vector<at::Tensor> shares;  // deterministic mode: partial sums of this step's passes, as a binary tree
  at::Tensor before;               // and the gradient that was there before them; undefined: none
};

struct Bucket {
  int index = -1;
  int unit = -1;             // the unit whose parameters these are; -1: parameters that are always whole
  std::vector<Sink*> sinks;  // in the order they lie in memory
  bool frozen = false;       // on no rank one of them was trained at the last step, or when it was placed: reduced
                             // only if somebody asks
  at::ScalarType dtype = at::kFloat;  // of the gradient: the widest that a member's rule asks for
  int64_t numel = 0;                  // of all of them, with padding that stays zero
  Range kept;            // of the reduced gradient: this rank's part where gradients are sharded, otherwise all of it
  Range updated;         // by this rank's optimizer: its part where the state is sharded, otherwise all of it
  Range held;            // of the parameters: this rank's part where they are sharded, otherwise all of them
  at::Tensor gradient;   // the reduced gradient, `kept` of it; made when the first one comes
  at::Tensor parameter;  // flat, `held` of them; undefined until somebody wants it
  Incoming incoming;
  Lanes lanes;  // of `gradient`, of `incoming`, and of the optimizer's state

  int convoy = -1;    // buckets of one convoy are reduced together
  bool alone = true;  // in messages of its own

  bool captured = false;  // a graph was captured that writes the gradient: its memory stays where it is
  bool made_up = false;   // got weight gradients between passes, which wait for a reduction

  // The state of this pass.
  int waiting = 0;        // sinks whose gradient is still expected
  bool launched = false;  // the reduction has begun
  bool late = false;      // a gradient came after that: reduce once more when the backward has ended
  bool under_way = false;
  std::chrono::steady_clock::time_point begun{};  // the reduction, for the timeline
  std::shared_ptr<Pending> reduction;

  // Where the reduction of `incoming` arrives.
  const at::Tensor& target() const { return incoming.arriving.defined() ? incoming.arriving : gradient; }
  c10::Device device() const { return sinks[0]->parameter.device(); }
  bool has_gradient() const {
    return std::any_of(sinks.begin(), sinks.end(), [](const Sink* sink) { return sink->grad().defined(); });
  }
  // Whether this rank has something to reduce.
  bool wanted() const {
    return !incoming.shares.empty() || std::any_of(sinks.begin(), sinks.end(), [](const Sink* sink) {
      return sink->grad().defined() || sink->contributed || sink->collected > 0;
    });
  }
  // Whether none of its parameters is trained at the moment.
  bool idle() const {
    return std::none_of(sinks.begin(), sinks.end(), [](const Sink* sink) { return sink->parameter.requires_grad(); });
  }
  int64_t after(size_t sink) const { return sink + 1 < sinks.size() ? sinks[sink + 1]->slot.offset : numel; }
};

}  // namespace plumb

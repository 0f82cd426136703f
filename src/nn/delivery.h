// Contract 5: what becomes of a weight gradient, decided in one place for every operation that computes one itself.
#pragma once

#include <ATen/DimVector.h>
#include <ATen/core/Tensor.h>

#include <memory>

#include "plumb/fused.h"

namespace torch::autograd {
struct Node;
}

namespace plumb::nn {

enum class When { now, delayed };

enum class Returned { gradient, stand_in, nothing };

// One row of the delivery table.
struct Delivery {
  bool into_buffer = false;  // the sink's, with the beta that it says at the moment of the write
  When when = When::now;
  Returned returned = Returned::gradient;
};

// One weight in one backward.
struct Weight {
  at::Tensor leaf;  // undefined when the weight is computed from others
  std::shared_ptr<FusedSink> sink;
  bool wanted = false;                           // this backward wants its gradient at all
  bool demanded = false;                         // autograd::grad wants the gradient itself
  torch::autograd::Node* accumulator = nullptr;  // of the leaf; while the node runs
};

// The weight behind input `input` of the node that is running its backward. The parameter is found through the graph:
// what was saved may come back as another tensor.
Weight weight_of_running_node(size_t input);

Delivery decide(const Weight& weight, When asked);

// What a weight looks like, without its values: in a sharded model they may be gone when the gradient is made.
struct Like {
  explicit Like(const at::Tensor& weight) : sizes(weight.sizes()), options(weight.options().requires_grad(false)) {}
  c10::DimVector sizes;
  at::TensorOptions options;
};

// The sink's target in the weight's shape, after checking that the gradient of such a weight can go there. Throws before
// anything is written.
GradTarget open_checked(FusedSink& sink, const Like& weight);

// Zeros in the weight's shape that take no memory: what leaks by mistake adds nothing. The weight's accumulator drops them
// after the hooks on the gradient have run. Undefined if this backward was given one already: two would be added up.
at::Tensor stand_in(const Weight& weight, const Like& like);

// What the accumulator of a weight does whose gradient autograd never sees (its hooks; and the end of the backward, which
// waits for accumulators) comes after what the current stream was given.
void order_accumulator(const Weight& weight);

}  // namespace plumb::nn

// Counts: how often each parameter on a device was updated, kept there, where a captured step counts on. Neighbours in one
// tensor, so that a step counts all of them in one call.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "grad/sink.h"

namespace plumb {

class Counts {
 public:
  // A place for the parameter's, beginning at 0, unless it has one. It never moves: captured steps know it.
  void make_place(const Sink& sink);
  // The parameter's, one number; undefined where it has no place.
  const at::Tensor& of(const Sink& sink) const;
  // One more update of every parameter, by sink, that has a place.
  void count(const std::vector<bool>& updated);

 private:
  struct Block {
    at::Tensor counts;
    std::vector<int> sinks;  // by place
  };
  std::vector<Block> blocks_;
  std::vector<at::Tensor> places_;  // by sink
};

}  // namespace plumb

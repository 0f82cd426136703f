// Absence: a rank that ran out of inputs takes part in the others' passes with nothing, and need not clear or keep gradients
// as they do. It remembers the last mean for them: where they add to it, it must not count for less because one rank has
// left.
#pragma once

#include <deque>
#include <vector>

#include "grad/facts.h"
#include "grad/sink.h"

namespace plumb {

class Absence {
 public:
  // Around a pass of an absent rank. In between gradients are gone; afterwards the user has his again.
  void begin(const std::deque<Sink>& sinks);
  void end(const std::deque<Sink>& sinks);
  bool now() const { return now_; }

  // After a reduction that divided by all ranks, on every one of them: the buckets in which somebody had added to the mean
  // of before, to be reduced once more. Their absent members add what they remember first.
  void make_up(const std::deque<Sink>& sinks, const Agreement& all, std::vector<bool>& late);

 private:
  bool now_ = false;
  std::vector<at::Tensor> means_, users_;  // by sink
};

}  // namespace plumb

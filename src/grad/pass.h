// OpenPass: one backward of the user's while it is open, from its first gradient until the outermost backward around it has
// ended. There is one only while one is open.
#pragma once

#include <exception>
#include <vector>

namespace plumb {

struct OpenPass {
  // Whether its sums are reduced when it ends, or stay on this rank for a later reduction.
  enum class Sync { reduced, held };
  // Who says where it ends: the backwards it belongs to, or end_pass() for gradients that were delivered.
  enum class End { backward, told };

  Sync sync = Sync::reduced;
  End end = End::backward;
  bool rules_changed = false;    // nothing travels before all ranks have said that theirs did too
  int backwards = 0;             // that must end before it closes
  bool weighted = false;         // some of its backwards had a weight
  bool unweighted = false;       // some that brought a gradient had none
  int task = -1;                 // the graph task that brought the last gradient
  bool dropped = false;          // it failed, and is no pass of the step
  std::exception_ptr failure{};  // the first; the others go on, and are told at the end
  std::vector<int> arrivals{};   // sinks, in the order in which their gradients came
};

}  // namespace plumb

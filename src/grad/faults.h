// Faults a test can inject into the engine, to see that the ledger, or what ranks agree on, names each of them. None is ever armed in a run.
#pragma once

namespace plumb {

enum class Fault {
  none,
  drop_delivery,
  double_delivery,
  reduce_early,
  reduce_twice,
  reduce_never,
  consume_unreduced,
  consume_twice,
  consume_never,
  gather_unnamed,  // messages of gathers do not say what they gather
};

}  // namespace plumb

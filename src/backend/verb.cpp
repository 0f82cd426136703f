#include "backend/verb.h"

namespace plumb {

const char* name_of(Verb verb) {
  switch (verb) {
    case Verb::barrier:
      return "barrier";
    case Verb::broadcast:
      return "broadcast";
    case Verb::all_gather:
      return "all_gather";
    case Verb::reduce_scatter:
      return "reduce_scatter";
    case Verb::all_reduce:
      return "all_reduce";
    case Verb::all_to_all:
      return "all_to_all";
    case Verb::scatter:
      return "scatter";
  }
  return "an unknown collective";
}

c10d::OpType type_of(Verb verb) {
  using c10d::OpType;
  switch (verb) {
    case Verb::barrier:
      return OpType::BARRIER;
    case Verb::broadcast:
      return OpType::BROADCAST;
    case Verb::all_gather:
      return OpType::_ALLGATHER_BASE;
    case Verb::reduce_scatter:
      return OpType::_REDUCE_SCATTER_BASE;
    case Verb::all_reduce:
      return OpType::ALLREDUCE;
    case Verb::all_to_all:
      return OpType::ALLTOALL_BASE;
    case Verb::scatter:
      return OpType::SCATTER;
  }
  return OpType::UNKNOWN;
}

}  // namespace plumb

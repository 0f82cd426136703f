// The scenario fuzzer: random programs of the moves users make, over random small models.
#pragma once

#include <string>
#include <vector>

#include "scenarios/support/stage.h"

namespace plumb::scenarios {

struct Move {
  int kind = 0;
  int a = 0;  // what the kind makes of it: a head, a parameter, a micro-batch
  int b = 0;
};

// Everything a run depends on.
struct FuzzCase {
  uint64_t seed = 0;
  int ranks = 1;
  std::string strategy;
  std::vector<Move> moves;
};

FuzzCase random_case(uint64_t seed);
// Empty when the engine and the reference agree, otherwise the first difference in words.
std::string play(const FuzzCase& one);
// The shortest program found that still differs.
FuzzCase shrink(FuzzCase failing);
// The program as a person reads it.
std::string tell(const FuzzCase& one);

}  // namespace plumb::scenarios

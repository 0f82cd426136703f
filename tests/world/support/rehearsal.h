// The verbs of a Group on any world, with random data and sizes, each compared with what one process computes.
#pragma once

#include "plumb/world.h"

namespace plumb::testing {

// Every verb, dtype and way of passing memory, in random order; throws std::runtime_error that names what is wrong.
// All ranks with one seed.
void rehearse(const World& world, uint32_t seed, int rounds);

}  // namespace plumb::testing

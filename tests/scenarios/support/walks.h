// Drawn programs whose ranks use different units, in orders of their own.
#pragma once

#include "scenarios/support/stage.h"

namespace plumb::scenarios {

Scenario walks(uint64_t seed);

}  // namespace plumb::scenarios

// Placeholder until the table is written below.
#include "plumb/sim.h"

namespace plumb::sim {
std::string coverage_table() { return {}; }
}  // namespace plumb::sim

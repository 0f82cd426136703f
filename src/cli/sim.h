// `plumb sim`: the engine's stream scenarios on the simulated accelerator.
#pragma once

#include <string>
#include <vector>

namespace plumb::cli {

// Exit code 0: no race, and every result is the CPU's; 1 otherwise.
int sim(const std::vector<std::string>& words);

}  // namespace plumb::cli

// `plumb checkpoint`: looks at checkpoints, compares and converts them. Memory is bounded by the largest tensor.
#pragma once

#include <string>
#include <vector>

namespace plumb::cli {

int checkpoint(const std::vector<std::string>& words);

}  // namespace plumb::cli

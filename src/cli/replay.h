// `plumb replay`: a step that failed, once more, in one process.
#pragma once

#include <string>
#include <vector>

namespace plumb::cli {

// Returns 0 where the failure shows again, 1 where it does not. Throws UsageError, Error.
int replay(const std::vector<std::string>& words);

}  // namespace plumb::cli

// `plumb info`: versions, devices and backends, for people and for bug reports.
#pragma once

#include <string>
#include <vector>

namespace plumb::cli {

// Throws UsageError for words it does not know.
int info(const std::vector<std::string>& words);

}  // namespace plumb::cli

// Where a rank stands in its program, for error reports: "backward 2 of step 5".
#pragma once

#include <cstdint>
#include <string>

namespace plumb {

struct Where {
  enum class Kind { setup, backward, step, rebuild } kind = Kind::setup;
  int64_t step = 0;      // steps finished
  int64_t pass = 0;      // backwards begun since then
  std::string detail{};  // what exactly, for humans: "reduction of bucket 3"
};

}  // namespace plumb

// The one exception type users see: what was found, what was expected, what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace plumb {

class Error : public std::runtime_error {
 public:
  // `message` without prefix; `what()` reads "plumb: message".
  explicit Error(const std::string& message) : std::runtime_error("plumb: " + message) {}
  // `what()` reads "plumb: rank R: message".
  Error(int rank, const std::string& message)
      : std::runtime_error("plumb: rank " + std::to_string(rank) + ": " + message) {}
};

}  // namespace plumb

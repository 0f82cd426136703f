// What a strict reader says of what it refuses.
#pragma once

#include <functional>
#include <string>

#include "plumb/error.h"

namespace plumb::test {

// The error without "plumb: "; empty: there was none.
inline std::string refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string said = error.what();
    return said.starts_with("plumb: ") ? said.substr(7) : said;
  }
  return "";
}

}  // namespace plumb::test

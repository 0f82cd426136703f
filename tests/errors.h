// What every rank of a program ends with: errors are to reach all of them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "plumb/plumb.h"
#include "slowness.h"

namespace plumb::test {

// Every rank's error, or "none". Nobody may wait for the time-out to hear of it.
inline std::vector<std::string> errors(int ranks, const std::function<void(World)>& body,
                                       std::chrono::milliseconds timeout = std::chrono::seconds(120 * patience)) {
  std::vector<std::string> texts(ranks, "none");
  const auto begin = std::chrono::steady_clock::now();
  run_local(ranks,
            [&](World world) {
              try {
                body(world);
              } catch (const std::exception& error) {
                texts[world.rank()] = error.what();
              }
            },
            {.timeout = timeout});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60 * patience))
      << "an error must not wait for the time-out";
  return texts;
}

}  // namespace plumb::test

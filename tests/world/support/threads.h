// Ranks that are threads of this process.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace plumb::testing {

// Runs `body` on a thread for every rank. Returns what each threw.
inline std::vector<std::string> on_threads(int size, const std::function<void(int rank)>& body) {
  std::vector<std::string> thrown(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& e) {
        thrown[rank] = e.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return thrown;
}

inline void expect_all_well(const std::vector<std::string>& thrown) {
  for (const auto& text : thrown) EXPECT_EQ(text, "");
}

}  // namespace plumb::testing

// Connecting over gloo, where a rank is missing.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>

#include "backend/gloo.h"

namespace plumb::testing {
namespace {

using std::chrono::milliseconds;

TEST(GlooConnect, EndsWithinTheTimeOutThoughTheStoreWouldWaitLonger) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(milliseconds(20'000));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_ANY_THROW(make_gloo(store, 0, 2, milliseconds(500), "127.0.0.1", 1));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(15'000));
}

}  // namespace
}  // namespace plumb::testing

// Over gloo: connecting where a rank is missing, and messages between two ranks.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <mutex>

#include "backend/gloo.h"
#include "backend/links.h"
#include "world/support/threads.h"

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

// Messages that cannot be asked whether they have come: a thread waits for them, one call behind the other.
TEST(GlooConnect, LinksOverItBringEveryRoundOfSeveralCalls) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  expect_all_well(on_threads(3, [&](int rank) {
    const auto backend = make_gloo(store, rank, 3, milliseconds(60'000), "127.0.0.1", 1).front();
    std::mutex issuing;
    Links links(backend, issuing, std::make_shared<Wire>(), Cargo::control);
    EXPECT_TRUE(Links::offered_by(*backend));
    for (int turn = 0; turn < 4; ++turn) {
      const at::Tensor block = at::full({4}, 10 * rank + turn, at::kLong), all = at::empty({12}, at::kLong);
      const at::Tensor sum = at::full({2}, rank + 1, at::kLong);
      const auto first = links.start(spread(rank, 3, block, all), 7 + turn);
      const auto second =
          links.start(combination(rank, 3, sum, [sum](const at::Tensor& other) { at::Tensor(sum).add_(other); }), 70);
      EXPECT_TRUE(second->wait(milliseconds(60'000)));
      EXPECT_TRUE(first->wait(milliseconds(60'000)));
      EXPECT_TRUE(first->isCompleted());
      for (int r = 0; r < 3; ++r) EXPECT_TRUE(all.narrow(0, 4 * r, 4).eq(10 * r + turn).all().item<bool>());
      EXPECT_TRUE(sum.eq(6).all().item<bool>());
    }
    std::vector<at::Tensor> one{at::ones({1})};
    backend->allreduce(one)->wait();  // nobody leaves before the others are done
  }));
}

}  // namespace
}  // namespace plumb::testing

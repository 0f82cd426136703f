// How often each parameter on a device was updated: against a plain list of numbers.
#include "optim/counts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;

// Parameters come when they come, and are updated or not; more of them than a block has room for, and on two devices.
TEST(Counts, AreThoseOfAPlainListWhicheverParametersAreUpdated) {
  for (const int64_t size : {1, 7, 1023, 1024, 1025, 2100}) {
    SCOPED_TRACE(size);
    Draw draw(size);
    std::deque<Sink> sinks;
    for (int64_t i = 0; i < size; ++i) {
      Sink& sink = sinks.emplace_back();
      sink.index = static_cast<int>(i);
      sink.parameter = at::empty({1}, draw.one_in(3) ? at::kMeta : at::kCPU);
    }
    Counts counts;
    std::vector<int64_t> wanted(size, -1);  // -1: it has no place
    std::vector<const at::TensorImpl*> places(size);
    // All of them in the end, each round some more, in any order.
    std::vector<int64_t> order(size);
    for (int64_t i = 0; i < size; ++i) order[i] = i;
    if (draw.one_in(2)) std::shuffle(order.begin(), order.end(), std::mt19937_64(size));
    for (int round = 0; round < 4; ++round) {
      for (int64_t i = size * round / 4; i < size * (round + 1) / 4; ++i) {
        EXPECT_FALSE(counts.of(sinks[order[i]]).defined());
        counts.make_place(sinks[order[i]]);
        wanted[order[i]] = 0;
        places[order[i]] = counts.of(sinks[order[i]]).unsafeGetTensorImpl();
      }
      if (wanted[order[0]] >= 0) counts.make_place(sinks[order[0]]);  // has one, which stays
      std::vector<bool> updated(draw.one_in(2) ? size
                                               : draw.whole(0, size));  // parameters behind them are not known yet
      for (size_t i = 0; i < updated.size(); ++i) updated[i] = round == 3 || !draw.one_in(3);
      counts.count(updated);
      for (size_t i = 0; i < updated.size(); ++i) {
        if (updated[i] && wanted[i] >= 0) ++wanted[i];
      }
      for (int64_t i = 0; i < size; ++i) {
        const at::Tensor& found = counts.of(sinks[i]);
        ASSERT_EQ(found.defined(), wanted[i] >= 0) << i;
        if (!found.defined()) continue;
        ASSERT_EQ(found.unsafeGetTensorImpl(), places[i]) << i << " moved";
        ASSERT_EQ(found.device(), sinks[i].parameter.device());
        ASSERT_EQ(found.dim(), 0);
        if (found.is_cpu()) {
          ASSERT_EQ(found.item<float>(), static_cast<float>(wanted[i])) << i << ", round " << round;
        }
      }
    }
  }
}

}  // namespace
}  // namespace plumb

// The shm backend over lengths that differ: between pairs of ranks, as they may, and between ranks, as they may not.
#include <gmock/gmock.h>

#include "world/support/shm_threads.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using std::chrono::milliseconds;
using Groups = ShmGroups;

// Other numbers of rows for every pair of ranks, in messages that fit into a slot and in ones that do not.
TEST(Shm, AllToAllBringsEveryPairItsRows) {
  for (const int64_t row : {1, 7, 5000}) {
    expect_all_well(on_threads(3, [&](int rank, ShmHeap& heap, const Groups& make) {
      const Backend group = make(0);
      EXPECT_EQ(heap_of(*group).get(), &heap);
      const auto rows = [](int from, int to) -> int64_t { return (from + 2 * to) % 4; };
      std::vector<int64_t> sent, expected;
      int64_t out = 0, in = 0;
      for (int other = 0; other < 3; ++other) {
        sent.push_back(rows(rank, other));
        expected.push_back(rows(other, rank));
        out += sent.back();
        in += expected.back();
      }
      at::Tensor input = at::empty({out, row}), output = at::full({in, row}, -1.0);
      int64_t at = 0;
      for (int to = 0; to < 3; ++to) {
        for (int64_t i = 0; i < sent[to]; ++i, ++at) input[at].fill_(100 * rank + 10 * to + i);
      }
      group->alltoall_base(output, input, expected, sent)->wait(milliseconds(60'000));
      at = 0;
      for (int from = 0; from < 3; ++from) {
        for (int64_t i = 0; i < expected[from]; ++i, ++at) {
          EXPECT_TRUE(output[at].eq(100 * from + 10 * rank + i).all().item<bool>()) << from << " to " << rank;
        }
      }
    }));
  }
}

// Lengths that differ behind the first piece are found before anything is summed.
TEST(Shm, LongTensorsOfOtherLengthsTouchNothing) {
  const auto thrown = on_threads(2, [](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    const at::Tensor tensor = group->allocateTensor((1 << 20) + 100 + rank, at::kFloat).fill_(1.0 + rank);
    try {
      all_reduce(group, tensor)->wait(milliseconds(60'000));
    } catch (...) {
      EXPECT_TRUE(tensor.eq(1.0 + rank).all().item<bool>()) << rank;
      throw;
    }
  });
  for (const std::string& text : thrown) {
    EXPECT_THAT(text, AllOf(HasSubstr("of 1048676 Float"), HasSubstr("of 1048677 Float")));
  }
}

}  // namespace
}  // namespace plumb::testing

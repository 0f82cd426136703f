// Shared memory as an allocator: what it hands out, takes back, and keeps for those who still read it.
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <random>

#include "world/support/shm_threads.h"

namespace plumb::testing {
namespace {

using Block = ShmHeap::Block;
using std::chrono::milliseconds;
constexpr int64_t page = 4096;

void alone(const std::function<void(ShmHeap&, const ShmGroups&)>& body) {
  expect_all_well(on_threads(1, [&](int, ShmHeap& heap, const ShmGroups& make) { body(heap, make); }));
}

// Where the next block of this size would lie.
int64_t next_place(ShmHeap& heap, int64_t bytes) {
  const Block block = heap.allocate(bytes);
  heap.free(block);
  return block.offset;
}

bool holds(const ShmHeap& heap, const Block& block, char value) {
  const char* begin = heap.at(0, block.offset);
  return std::all_of(begin, begin + block.bytes, [&](char byte) { return byte == value; });
}

TEST(ShmHeap, HandsOutZeroedPagesThatNeverOverlap) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  alone([&](ShmHeap& heap, const ShmGroups&) {
    std::mt19937 random(seed);
    const int64_t first = next_place(heap, 1);
    struct Held {
      Block block;
      char mark;
    };
    std::map<int64_t, Held> held;
    for (int i = 0; i < 600 / slowness; ++i) {
      if (held.size() > 12 || (!held.empty() && random() % 3 == 0)) {
        const auto it = std::next(held.begin(), random() % held.size());
        ASSERT_TRUE(holds(heap, it->second.block, it->second.mark)) << "somebody else wrote to it";
        heap.free(it->second.block);
        held.erase(it);
        continue;
      }
      const int64_t wanted = static_cast<int64_t>(random() % 4) * page + static_cast<int64_t>(random() % 3) - 1;
      const Block block = heap.allocate(wanted);
      ASSERT_GE(block.offset, first);
      ASSERT_EQ(block.offset % page, 0);
      ASSERT_EQ(block.bytes, (std::max<int64_t>(wanted, 1) + page - 1) / page * page);
      ASSERT_TRUE(holds(heap, block, 0)) << "not zeroed";
      const auto next = held.lower_bound(block.offset);
      if (next != held.end()) {
        ASSERT_LE(block.offset + block.bytes, next->first);
      }
      if (next != held.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second.block.bytes, block.offset);
      }
      const char mark = static_cast<char>(1 + random() % 100);
      std::memset(heap.at(0, block.offset), mark, block.bytes);
      held[block.offset] = {block, mark};
    }
    for (const auto& [offset, one] : held) heap.free(one.block);
    EXPECT_EQ(next_place(heap, 64 * page), first) << "what was freed did not become one again";
  });
}

TEST(ShmHeap, FreedNeighboursBecomeOneInWhateverOrderTheyGo) {
  alone([](ShmHeap& heap, const ShmGroups&) {
    std::vector<int> order{0, 1, 2, 3};
    do {
      std::vector<Block> blocks;
      for (int64_t pages : {1, 2, 3, 1}) blocks.push_back(heap.allocate(pages * page));
      const Block wall = heap.allocate(page);
      for (size_t i = 1; i < blocks.size(); ++i) {
        ASSERT_EQ(blocks[i].offset, blocks[i - 1].offset + blocks[i - 1].bytes);
      }
      for (const int i : order) heap.free(blocks[i]);
      // All seven pages in front of the wall fit one block; eight do not.
      EXPECT_EQ(next_place(heap, 7 * page), blocks[0].offset);
      EXPECT_EQ(next_place(heap, 8 * page), wall.offset + wall.bytes);
      heap.free(wall);
    } while (std::next_permutation(order.begin(), order.end()));
  });
}

TEST(ShmHeap, KnowsItsBounds) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap& heap, const ShmGroups&) {
    for (int r = 0; r < 2; ++r) {
      int64_t end = 0;  // of the segment: the most that lies within
      for (int64_t step = int64_t{1} << 50; step > 0; step /= 2) end += heap.within(r, 0, end + step) ? step : 0;
      ASSERT_GT(end, page);
      EXPECT_EQ(end % page, 0);
      EXPECT_TRUE(heap.within(r, end, 0));
      EXPECT_TRUE(heap.within(r, end - 1, 1));
      EXPECT_FALSE(heap.within(r, end, 1));
      EXPECT_FALSE(heap.within(r, end + 1, 0));
      EXPECT_FALSE(heap.within(r, -1, 1));
      EXPECT_FALSE(heap.within(r, 0, -1));
      EXPECT_FALSE(heap.within(r, page, std::numeric_limits<int64_t>::max()));
      EXPECT_FALSE(heap.within(r, std::numeric_limits<int64_t>::max(), page));
      const bool own = r == rank;
      EXPECT_EQ(heap.offset_of(heap.at(r, 0)), own ? 0 : -1);
      EXPECT_EQ(heap.offset_of(heap.at(r, end - 1)), own ? end - 1 : -1);
      if (!own) continue;
      EXPECT_EQ(heap.offset_of(heap.at(r, 0) - 1), -1);
      EXPECT_EQ(heap.offset_of(heap.at(r, 0) + end), -1);
    }
    int ordinary = 0;
    EXPECT_EQ(heap.offset_of(&ordinary), -1);
  }));
}

// A rank's segment: as much as the machine has, and no file is longer than the process may make one.
TEST(ShmHeap, ReservesNoMoreThanThereIs) {
  const auto reserved = [] {
    int64_t end = 0;
    alone([&](ShmHeap& heap, const ShmGroups&) {
      for (int64_t step = int64_t{1} << 50; step > 0; step /= 2) end += heap.within(0, 0, end + step) ? step : 0;
    });
    return end;
  };
  struct sysinfo machine{};
  ASSERT_EQ(sysinfo(&machine), 0);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlim_t memory = static_cast<rlim_t>(machine.totalram) * machine.mem_unit;
  EXPECT_EQ(reserved(), static_cast<int64_t>(std::min(memory, before.rlim_cur)) / page * page);
  const rlimit less{(64 << 20) + 5, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
  const int64_t limited = reserved();
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(limited, 64 << 20);
}

TEST(ShmHeap, LendsBlocksInPowersOfTwoAndKeepsALimitedNumberOfThemAsTheyAre) {
  alone([](ShmHeap& heap, const ShmGroups&) {
    for (const auto& [wanted, given] : std::map<int64_t, int64_t>{
             {1, page}, {page - 1, page}, {page, page}, {page + 1, 2 * page}, {5 * page, 8 * page}}) {
      const Block block = heap.borrow(wanted);
      EXPECT_EQ(block.bytes, given) << wanted;
      std::memset(heap.at(0, block.offset), 5, block.bytes);
      heap.give_back(block);
      const Block again = heap.borrow(wanted);
      EXPECT_EQ(again.offset, block.offset);
      EXPECT_TRUE(holds(heap, again, 5)) << "taken from somewhere else, or zeroed for nothing";
      heap.free(again);
    }
    // Whoever wants less leaves the larger ones to those that want them.
    const Block large = heap.borrow(8 * page);
    heap.give_back(large);
    const Block small = heap.borrow(page), large_again = heap.borrow(8 * page);
    EXPECT_NE(small.offset, large.offset);
    EXPECT_EQ(large_again.offset, large.offset);
    heap.free(small);
    heap.free(large_again);
    // 64 MiB of what came back stay; the rest is free memory again.
    std::vector<Block> blocks;
    for (int i = 0; i < 5; ++i) {
      blocks.push_back(heap.borrow(16 << 20));
      *heap.at(0, blocks.back().offset) = 7;
    }
    for (const Block& block : blocks) heap.give_back(block);
    int as_it_was = 0;
    for (Block& block : blocks) {
      block = heap.borrow(16 << 20);
      as_it_was += *heap.at(0, block.offset) == 7 ? 1 : 0;
    }
    EXPECT_EQ(as_it_was, 4);
    // What was lent again no longer counts.
    for (int i = 0; i < 6; ++i) {
      *heap.at(0, blocks[0].offset) = 9;
      heap.give_back(blocks[0]);
      blocks[0] = heap.borrow(16 << 20);
      EXPECT_EQ(*heap.at(0, blocks[0].offset), 9);
    }
    for (const Block& block : blocks) heap.free(block);
  });
}

TEST(ShmHeap, NeverUsesACondemnedBlockAgainAndItsNeighboursAlways) {
  alone([](ShmHeap& heap, const ShmGroups&) {
    for (const int64_t inside : {int64_t{0}, int64_t{64}, 2 * page - 1}) {
      const Block before = heap.allocate(page);
      const Block block = heap.allocate(2 * page);
      const Block after = heap.allocate(page);
      heap.condemn(block.offset + inside);
      heap.free(block);
      EXPECT_NE(next_place(heap, 2 * page), block.offset);
      heap.free(before);
      EXPECT_EQ(next_place(heap, page), before.offset);
      heap.free(after);
      EXPECT_EQ(next_place(heap, 2 * page), after.offset);
      EXPECT_EQ(heap.allocate(page).offset, before.offset);  // in the way of the next turn
    }
  });
}

TEST(ShmHeap, ATensorsBlockIsTheNextOnesWhenItGoes) {
  alone([](ShmHeap& heap, const ShmGroups&) {
    for (const auto dtype : {at::kByte, at::kFloat, at::kComplexDouble}) {
      at::Tensor tensor = heap.tensor(page, dtype);
      const int64_t place = heap.offset_of(tensor.data_ptr());
      EXPECT_EQ(tensor.numel(), page);
      EXPECT_EQ(next_place(heap, 1), place + static_cast<int64_t>(tensor.nbytes()));
      tensor.reset();
      EXPECT_EQ(next_place(heap, 1), place);
    }
    EXPECT_FALSE(heap.tensor(int64_t{1} << 50, at::kByte).defined());  // more than any machine has
    EXPECT_FALSE(heap.window(int64_t{1} << 50, at::kByte).defined());
  });
}

TEST(ShmHeap, AClosedGroupsMemoryStaysUntilEveryRankHasClosedIt) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap& heap, const ShmGroups& make) {
    const auto first = make(0);
    const auto meet = [&] { first->barrier()->wait(milliseconds(20'000)); };
    const int64_t place = next_place(heap, 1);
    auto second = make(1);
    EXPECT_GT(next_place(heap, 1), place);  // its mailbox lies there
    if (rank == 0) second.reset();
    EXPECT_GT(next_place(heap, 1), place) << "the other rank may still read it";
    meet();
    second.reset();
    meet();
    heap.keep_window(heap.window(1, at::kFloat));  // looks at what the others have closed
    EXPECT_EQ(next_place(heap, 1), place);
    meet();
  }));
}

TEST(ShmHeap, MemoryThatOthersMayStillWriteToIsNotUsedAgain) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap& heap, const ShmGroups& make) {
    const auto first = make(0);
    auto second = make(1);
    if (rank == 0) {
      // Arrived at, then given up: when the other rank comes, it would write its sums there.
      at::Tensor tensor = second->allocateTensor(100'000, at::kFloat);
      const int64_t place = heap.offset_of(tensor.data_ptr());
      const auto work = all_reduce(second, tensor);
      second.reset();
      EXPECT_THROW(work->wait(milliseconds(1'000)), Error);
      const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
      tensor.reset();
      EXPECT_NE(next_place(heap, bytes), place);
    }
    first->barrier()->wait(milliseconds(20'000));
  }));
}

// Two engines of one rank, each with a thread: what one lets go is freed once, and nobody else's.
TEST(ShmHeap, WindowsOfSeveralThreadsAreEachTheirOwn) {
  alone([](ShmHeap& heap, const ShmGroups&) {
    const int64_t before = next_place(heap, page);
    expect_all_well(on_threads(3, [&](int thread) {
      for (int i = 0; i < 3'000; ++i) {
        const at::Tensor one = heap.window(8, at::kLong), other = heap.window(8, at::kLong);
        one.fill_(thread);
        other.fill_(thread + 10);
        if (!one.eq(thread).all().item<bool>() || !other.eq(thread + 10).all().item<bool>()) {
          throw std::runtime_error("somebody else has the same window");
        }
      }
    }));
    EXPECT_EQ(next_place(heap, page), before) << "all of it is free again";
  });
}

}  // namespace
}  // namespace plumb::testing

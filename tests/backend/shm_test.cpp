// The shm backend with threads as ranks, which the sanitizers see: results, order, memory, and what is refused.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <latch>
#include <random>
#include <thread>

#include "world/support/drill.h"
#include "world/support/shm_threads.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using std::chrono::milliseconds;

using Groups = ShmGroups;

int64_t resident_shared_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssShmem:", 0) == 0) return std::stoll(line.substr(9));
  }
  return -1;
}

int64_t mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

class ShmRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Shm, ShmRanks, ::testing::Values(1, 2, 3, 4));

TEST_P(ShmRanks, CarriesEveryVerbAndDtypeInSharedAndOrdinaryMemory) {
  expect_all_well(on_threads(GetParam(), [](int, ShmHeap&, const Groups& group) { drill(*group(0)); }));
}

TEST_P(ShmRanks, CarriesRandomSequencesOverSeveralGroups) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  expect_all_well(on_threads(GetParam(), [&](int, ShmHeap&, const Groups& group) {
    const std::vector<Backend> groups{group(0), group(1), group(2)};
    soak({groups[0].get(), groups[1].get(), groups[2].get()}, seed, 1000 / slowness);
  }));
}

TEST(Shm, TakesEffectInTheOrderOfIssueOnOneTensor) {
  for (const int64_t numel : {10, 5'000, 3'000'000 / slowness}) {
    for (const bool shared : {false, true}) {
      expect_all_well(on_threads(3, [&](int rank, ShmHeap&, const Groups& make) {
        const Backend group = make(0);
        at::Tensor tensor = shared ? group->allocateTensor(numel, at::kFloat) : at::empty({numel});
        tensor.fill_(rank + 1);
        std::vector<at::Tensor> one{tensor};
        const auto a = group->allreduce(one);  // 6 everywhere
        const auto b = group->allreduce(one);  // 18
        at::Tensor gathered = at::empty({3 * numel});
        const auto c = group->_allgather_base(gathered, tensor);
        const auto d = group->allreduce(one);  // 54
        for (const auto& work : {d, c, b, a}) work->wait(milliseconds(60'000));
        if (!tensor.eq(54).all().item<bool>()) throw Error(rank, "the all-reduces were mixed up");
        if (!gathered.eq(18).all().item<bool>()) throw Error(rank, "the all-gather saw another value");
      }));
    }
  }
}

TEST(Shm, GroupsWaitedForInOppositeOrdersEndAllTheSame) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap&, const Groups& make) {
    const Backend a = make(0), b = make(1);
    for (int i = 0; i < 50; ++i) {
      const at::Tensor x = a->allocateTensor(100'000, at::kFloat).fill_(1);
      const at::Tensor y = a->allocateTensor(100'000, at::kFloat).fill_(2);
      at::Tensor full = at::empty({200'000});
      at::Tensor shard = y;
      const auto first = all_reduce(a, x);
      const auto second = b->_allgather_base(full, shard);
      (rank == 0 ? first : second)->wait(milliseconds(20'000));
      (rank == 0 ? second : first)->wait(milliseconds(20'000));
    }
  }));
}

TEST(Shm, SeveralThreadsOfARankMayWaitAtOnce) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    for (int i = 0; i < 100; ++i) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      std::vector<at::Tensor> tensors;
      for (int k = 0; k < 4; ++k) {
        tensors.push_back(group->allocateTensor(20'000, at::kFloat).fill_(rank + k));
        works.push_back(all_reduce(group, tensors.back()));
      }
      std::vector<std::thread> waiters;
      for (const auto& work : works) waiters.emplace_back([&work] { work->wait(milliseconds(60'000)); });
      for (auto& waiter : waiters) waiter.join();
      for (int k = 0; k < 4; ++k) {
        if (tensors[k][19'999].item<float>() != 2 * k + 1) throw Error(rank, "a wrong sum");
      }
    }
  }));
}

TEST(Shm, MoreCollectivesThanTheRingHasSlotsMayBeUnderWay) {
  std::atomic<bool> issued{false};
  expect_all_well(on_threads(2, [&](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    while (rank == 1 && !issued) std::this_thread::yield();  // until rank 0 would have gone round the ring
    for (int i = 0; i < 500; ++i) {
      tensors.push_back(at::full({i % 2 == 0 ? 3 : 10'000}, rank + i));
      works.push_back(all_reduce(group, tensors.back()));
    }
    issued = true;
    for (int i = 499; i >= 0; --i) {
      works[i]->wait(milliseconds(60'000));
      if (tensors[i][2].item<int64_t>() != 2 * i + 1) throw Error(rank, "a wrong sum");
    }
  }));
}

TEST(Shm, ATensorThatOthersStillReadIsNotItsRanksYet) {
  std::atomic<int> stage{0};
  expect_all_well(on_threads(2, [&](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    at::Tensor shard = group->allocateTensor(100'000, at::kFloat).fill_(rank);
    at::Tensor full = at::empty({200'000});
    while (rank == 0 && stage < 1) std::this_thread::yield();
    const auto work = group->_allgather_base(full, shard);
    if (rank == 1) {
      stage = 1;
      while (stage < 2) std::this_thread::yield();  // has arrived, and read nothing yet
    } else {
      EXPECT_FALSE(work->isCompleted());
      stage = 2;
    }
    work->wait(milliseconds(20'000));
    shard.fill_(9);
    if (full.sum().item<float>() != 100'000) throw Error(rank, "saw a tensor that was written again");
  }));
}

TEST(Shm, ACopyIsNotWaitedFor) {
  std::atomic<int> stage{0};
  expect_all_well(on_threads(2, [&](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    const at::Tensor tensor = group->allocateTensor(4, at::kFloat).fill_(rank + 1);
    while (rank == 0 && stage < 1) std::this_thread::yield();
    const auto work = all_reduce(group, tensor);
    if (rank == 1) {
      stage = 1;
      while (stage < 2) std::this_thread::yield();
    } else {
      EXPECT_TRUE(work->isCompleted());
      stage = 2;
    }
    work->wait(milliseconds(20'000));
    EXPECT_EQ(tensor[3].item<float>(), 3);
  }));
}

TEST(Shm, ARankThatWaitsDoesTheShareOfOneThatComputes) {
  std::atomic<int> stage{0};
  expect_all_well(on_threads(2, [&](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    const at::Tensor tensor = group->allocateTensor(3'000'000, at::kFloat).fill_(rank + 1);
    while (rank == 0 && stage < 1) std::this_thread::yield();
    const auto work = all_reduce(group, tensor);
    if (rank == 1) {
      stage = 1;
      while (stage < 2) std::this_thread::yield();
    } else {
      work->wait(milliseconds(20'000));
      stage = 2;
    }
    work->wait(milliseconds(20'000));
    if (!tensor.eq(3).all().item<bool>()) throw Error(rank, "a wrong sum");
  }));
}

// What two ranks call, and what both must be told.
void expect_mismatch(const std::function<c10::intrusive_ptr<c10d::Work>(int rank, const Backend&)>& call,
                     const std::string& one, const std::string& other) {
  const auto thrown = on_threads(3, [&](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    const auto work = call(rank, group);
    try {
      work->wait(milliseconds(20'000));
    } catch (...) {
      EXPECT_TRUE(work->isCompleted());
      EXPECT_ANY_THROW(group->barrier()->wait(milliseconds(20'000)));  // the group is dead
      throw;
    }
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(thrown[r], AllOf(HasSubstr("rank " + std::to_string(r) + ": "), HasSubstr(one), HasSubstr(other)));
  }
}

TEST(Shm, RanksThatCallDifferentCollectivesAllHearOfBoth) {
  for (const int64_t numel : {4, 40'000, 4'000'000}) {
    const std::string count = std::to_string(numel);
    for (const bool shared : {false, true}) {
      const auto tensor = [=](const Backend& group, int64_t n) {
        return shared ? group->allocateTensor(n, at::kFloat) : at::ones({n});
      };
      expect_mismatch(
          [&](int rank, const Backend& group) {
            return rank == 1 ? group->barrier() : all_reduce(group, tensor(group, numel));
          },
          "rank 0 called all_reduce(sum) of " + count + " Float", "rank 1 called barrier");
      expect_mismatch(
          [&](int rank, const Backend& group) {
            return all_reduce(group, tensor(group, rank == 2 ? numel + 1 : numel));
          },
          "rank 0 called all_reduce(sum) of " + count, "rank 2 called all_reduce(sum) of " + std::to_string(numel + 1));
      expect_mismatch(
          [&](int rank, const Backend& group) {
            return all_reduce(group, tensor(group, numel).view(rank == 1 ? at::kInt : at::kFloat));
          },
          "of " + count + " Float", "rank 1 called all_reduce(sum) of " + count + " Int");
      expect_mismatch(
          [&](int rank, const Backend& group) {
            std::vector<at::Tensor> one{tensor(group, numel)};
            c10d::BroadcastOptions options;
            options.rootRank = rank == 1 ? 1 : 0;
            return group->broadcast(one, options);
          },
          "broadcast from rank 0", "rank 1 called broadcast from rank 1");
    }
  }
  expect_mismatch(
      [](int rank, const Backend& group) {
        at::Tensor input = at::ones({6}), output = at::ones({rank == 1 ? 7 : 6});
        std::vector<int64_t> sent{2, 2, 2}, expected = sent;
        if (rank == 1) expected = {2, 3, 2};
        return group->alltoall_base(output, input, expected, sent);
      },
      "rank 1 sends 2 elements to rank 1", "which expects 3");
}

TEST(Shm, RefusesWhatItCannotCarryBeforeAnybodyWaits) {
  expect_all_well(on_threads(2, [](int, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    const auto refused = [&](const at::Tensor& tensor, c10d::ReduceOp::RedOpType op, const std::string& why) {
      std::vector<at::Tensor> one{tensor};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      try {
        group->allreduce(one, options);
        ADD_FAILURE() << "not refused: " << why;
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr(why));
      }
    };
    refused(at::ones({3}, at::kBool), c10d::ReduceOp::SUM, "Bool");
    refused(at::ones({3}, at::kLong), c10d::ReduceOp::AVG, "average");
    refused(at::ones({3}, at::kComplexFloat), c10d::ReduceOp::MAX, "no order");
    refused(at::ones({3}), c10d::ReduceOp::PRODUCT, "sum, avg, max and min only");
    refused(at::ones({3, 3}).t(), c10d::ReduceOp::SUM, "not contiguous");
    for (const int root : {-1, 2}) {
      std::vector<at::Tensor> one{at::ones({3})};
      c10d::BroadcastOptions from;
      from.rootRank = root;
      EXPECT_THROW(group->broadcast(one, from), Error);
    }
    group->barrier()->wait(milliseconds(20'000));
  }));
}

TEST(Shm, AWaitThatRanOutNamesTheLateRankAndMayBeRepeated) {
  std::atomic<bool> waited{false};
  expect_all_well(on_threads(2, [&](int rank, ShmHeap&, const Groups& make) {
    const Backend group = make(0);
    if (rank == 1) {
      while (!waited) std::this_thread::yield();
      all_reduce(group, at::ones({5}))->wait(milliseconds(20'000));
      return;
    }
    const at::Tensor tensor = at::ones({5});
    const auto work = all_reduce(group, tensor);
    try {
      work->wait(milliseconds(30));
      ADD_FAILURE() << "nobody came, and the wait ended";
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), AllOf(HasSubstr("waited 30 ms in all_reduce"), HasSubstr("rank 1, which did not come")));
    }
    EXPECT_FALSE(work->isCompleted());
    waited = true;
    work->wait(milliseconds(20'000));
    EXPECT_EQ(tensor[4].item<float>(), 2);
  }));
}

TEST(Shm, TensorsGiveTheirMemoryBack) {
  expect_all_well(on_threads(1, [](int, ShmHeap& heap, const Groups& make) {
    const Backend group = make(0);
    std::mt19937 random(7);
    std::vector<at::Tensor> held(16);
    for (int i = 0; i < 100; ++i)
      held[random() % 16] = group->allocateTensor(1 + random() % 50'000, at::kFloat).fill_(1);
    for (auto& tensor : held) tensor.reset();
    const int64_t before = resident_shared_kib();
    const int64_t maps = mappings();
    for (int i = 0; i < 10'000 / slowness; ++i) {
      held[random() % 16] = group->allocateTensor(1 + random() % 50'000, at::kFloat).fill_(1);
    }
    EXPECT_GT(resident_shared_kib(), before + 100);
    for (auto& tensor : held) tensor.reset();
    EXPECT_LE(resident_shared_kib(), before + 64);
    EXPECT_LE(mappings(), maps + 8);
    EXPECT_GE(heap.allocate(1 << 20).offset, 0);
  }));
}

TEST(Shm, AWindowIsFreedWhenEverybodyHasLetGo) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap& heap, const Groups& make) {
    const Backend group = make(0);
    const auto meet = [&] { group->barrier()->wait(milliseconds(20'000)); };
    int64_t before = 0;
    for (int turn = 0; turn < 50; ++turn) {
      // The heaps are alike: the n-th window of both is at one place.
      at::Tensor mine = heap.window(300'000, at::kFloat).fill_(turn + rank);
      at::Tensor other = heap.window_of(1 - rank, heap.offset_of(mine.data_ptr()), 300'000, at::kFloat);
      meet();
      if (turn % 2 == rank) mine.reset();
      meet();
      EXPECT_EQ(other.sum().item<float>(), 300'000.f * (turn + 1 - rank));
      meet();
      mine.reset();
      other.reset();
      meet();
      heap.keep_window(heap.window(1, at::kFloat));  // looks for what the other has let go
      meet();
      if (turn == 1) before = resident_shared_kib();
      meet();
    }
    if (rank == 0) {
      EXPECT_LE(resident_shared_kib(), before + 1024);  // not one window more
    }
    meet();
  }));
}

// Whoever is the last: of several readers each keeps it for himself, and its owner for all of them.
TEST(Shm, AWindowStaysAsLongAsAnybodyReadsIt) {
  constexpr int size = 4;
  std::array<int64_t, size> places{};
  expect_all_well(on_threads(size, [&](int rank, ShmHeap& heap, const Groups& make) {
    const Backend group = make(0);
    for (int first = 0; first < size; ++first) {
      std::vector<at::Tensor> all;  // by owner
      at::Tensor mine = heap.window(5'000, at::kFloat).fill_(rank);
      places[static_cast<size_t>(rank)] = heap.offset_of(mine.data_ptr());
      group->barrier()->wait(milliseconds(20'000));
      for (int r = 0; r < size; ++r) {
        all.push_back(r == rank ? mine : heap.window_of(r, places[static_cast<size_t>(r)], 5'000, at::kFloat));
      }
      mine.reset();
      // One after the other lets go of everything, and fills what it is given next.
      for (int turn = 0; turn < size; ++turn) {
        group->barrier()->wait(milliseconds(20'000));
        for (size_t r = 0; r < all.size(); ++r) {
          EXPECT_TRUE(all[r].eq(static_cast<int64_t>(r)).all().item<bool>()) << "of rank " << r << " in turn " << turn;
        }
        group->barrier()->wait(milliseconds(20'000));
        if ((first + turn) % size == rank) all.clear();
        const at::Tensor next = heap.window(5'000, at::kFloat).fill_(-1);
        heap.keep_window(next);
      }
    }
    group->barrier()->wait(milliseconds(20'000));
  }));
}

TEST(Shm, AWindowThatNobodyElseReadsIsFreedAlone) {
  expect_all_well(on_threads(2, [](int, ShmHeap& heap, const Groups&) {
    at::Tensor mine = heap.window(9, at::kInt).fill_(3);
    const int64_t place = heap.offset_of(mine.data_ptr());
    EXPECT_EQ(place % 64, 0);
    heap.keep_window(mine);
    mine.reset();
    EXPECT_EQ(heap.offset_of(heap.window(9, at::kInt).data_ptr()), place);
  }));
}

TEST(Shm, ATensorOutlivesItsGroup) {
  at::Tensor tensor;
  expect_all_well(
      on_threads(1, [&](int, ShmHeap&, const Groups& make) { tensor = make(0)->allocateTensor(9, at::kInt); }));
  EXPECT_EQ(tensor.fill_(3).sum().item<int64_t>(), 27);
}

TEST(Shm, ClosedGroupsGiveTheirMemoryBack) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap&, const Groups& make) {
    const Backend first = make(0);
    int64_t before = 0;
    for (int serial = 1; serial < 200; ++serial) {
      const Backend group = make(serial);
      all_reduce(group, at::ones({200'000}))->wait(milliseconds(20'000));
      first->barrier()->wait(milliseconds(20'000));
      if (serial == 20) before = resident_shared_kib();
    }
    first->barrier()->wait(milliseconds(20'000));
    if (rank == 0) {
      EXPECT_LE(resident_shared_kib(), before + 4096);
    }
    first->barrier()->wait(milliseconds(20'000));
  }));
}

// What a process inherits by a fork is its parent's: whatever it lets go of stays as it is, and the parent goes on.
TEST(Shm, AForkedProcessLeavesWhatItInheritedToItsParent) {
  std::latch ended(2), ended_too(2);
  expect_all_well(on_threads(2, [&](int rank, ShmHeap& heap, const Groups& make) {
    Backend group = make(0);
    at::Tensor kept = heap.tensor(5'000, at::kFloat).fill_(rank + 1);
    at::Tensor mine = heap.window(5'000, at::kFloat).fill_(rank + 1);
    at::Tensor other = heap.window_of(1 - rank, heap.offset_of(mine.data_ptr()), 5'000, at::kFloat);
    const at::Tensor sum = group->allocateTensor(50'000, at::kFloat).fill_(rank + 1);
    group->barrier()->wait(milliseconds(20'000));
    c10::intrusive_ptr<c10d::Work> work;
    if (rank == 0) {
      work = all_reduce(group, sum);  // under way
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(60);
        kept.reset();
        mine.reset();
        other.reset();
        work.reset();
        group.reset();
        ::_exit(7);
      }
      int status = 0;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
    }
    ended.arrive_and_wait();
    if (rank == 1) work = all_reduce(group, sum);
    work->wait(milliseconds(20'000));
    EXPECT_TRUE(sum.eq(3).all().item<bool>());
    if (rank == 0) mine.reset();  // the other still reads it
    group->barrier()->wait(milliseconds(20'000));
    heap.keep_window(heap.window(9, at::kFloat).fill_(-1));  // looks for what can be freed
    group->barrier()->wait(milliseconds(20'000));
    EXPECT_TRUE(kept.eq(rank + 1).all().item<bool>());
    EXPECT_TRUE(other.eq(2 - rank).all().item<bool>());
    // Rank 1 leaves the group, and rank 0 has still to read there how it went.
    const auto last = all_reduce(group, sum);
    if (rank == 1) {
      last->wait(milliseconds(20'000));
      group.reset();
      heap.keep_window(heap.window(9, at::kFloat));
    }
    ended_too.arrive_and_wait();
    last->wait(milliseconds(20'000));
    EXPECT_TRUE(sum.eq(6).all().item<bool>());
  }));
}

TEST(Shm, AGroupThatIsClosedTooEarlyEndsItsCollectives) {
  expect_all_well(on_threads(2, [](int rank, ShmHeap&, const Groups& make) {
    const Backend first = make(0);
    Backend second = make(1);
    if (rank == 0) {
      const auto work = all_reduce(second, at::ones({5}));
      second.reset();
      EXPECT_TRUE(work->isCompleted());
      EXPECT_THROW(work->wait(milliseconds(1'000)), Error);
    }
    first->barrier()->wait(milliseconds(20'000));
  }));
}

}  // namespace
}  // namespace plumb::testing

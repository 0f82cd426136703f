// The `shm+tcp` backend between ranks that are threads of one process, on machines that are pretended: results, what crosses
// between machines, and what is said when it cannot go on.
#include "backend/hierarchy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <functional>
#include <numeric>
#include <thread>

#include "backend/shm_heap.h"
#include "backend/tcp.h"
#include "plumb/error.h"
#include "plumb/world.h"
#include "world/group.h"
#include "world/support/drill.h"
#include "world/support/threads.h"

namespace plumb::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Backend = c10::intrusive_ptr<Hierarchy>;
using Body = std::function<void(int rank, const Backend& backend, Wire& wire)>;

// Runs `body` on a thread for every rank, of machines that have so many each. Returns what each threw.
std::vector<std::string> on_machines(const std::vector<int>& ranks, const Body& body) {
  Tiers tiers{{0}};
  for (const int count : ranks) tiers.first.push_back(tiers.size() + count);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const auto keys = [&](const std::string& name) { return c10::make_intrusive<c10d::PrefixStore>(name, store); };
  return on_threads(tiers.size(), [&](int rank) {
    const int machine = tiers.machine_of(rank);
    HierarchyOptions options{.tiers = tiers, .rank = rank, .address = "127.0.0.1"};
    std::string why_not;
    if (tiers.ranks_on(machine) > 1) {
      const auto own = keys("heap " + std::to_string(machine));
      options.heap = ShmHeap::meet(*own, rank - tiers.first[machine], tiers.ranks_on(machine), why_not);
      if (!options.heap) throw Error(rank, why_not);
    }
    options.flat = make_tcp_backend(keys("flat"), rank, tiers.size(), "127.0.0.1", options.patience);
    options.wire = std::make_shared<Wire>();
    const auto wire = options.wire;
    body(rank, make_hierarchy(keys("tiers"), options), *wire);
  });
}

c10::intrusive_ptr<c10d::Work> all_reduce(c10d::Backend& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  return backend.allreduce(one);
}

Wire::Count total(const Wire& wire) {
  Wire::Count all;
  for (const Wire::Count& kind : wire.counts()) {
    all.rounds += kind.rounds;
    all.messages += kind.messages;
    all.bytes += kind.bytes;
  }
  return all;
}

TEST(Hierarchy, CarriesEveryVerbDtypeAndLength) {
  expect_all_well(on_machines({2, 1}, [](int, const Backend& backend, Wire&) { drill(*backend); }));
}

TEST(Hierarchy, CarriesRandomCallsThatAreWaitedForInAnotherOrderOnEachRank) {
  for (const std::vector<int>& machines : {std::vector{2, 1, 2}, {1, 3}}) {
    expect_all_well(on_machines(machines, [](int, const Backend& backend, Wire&) { soak({backend.get()}, 5, 40); }));
  }
}

// While nobody waits, and also while ranks wait for something else: the memory shows it.
TEST(Hierarchy, ACallEndsWhileItsRanksCompute) {
  expect_all_well(on_machines({2, 2}, [](int rank, const Backend& backend, Wire&) {
    for (const bool shared : {false, true}) {
      const at::Tensor mine = shared ? backend->allocateTensor(400'000, at::kFloat) : at::empty({400'000});
      mine.fill_(1.0 + rank);
      const auto work = all_reduce(*backend, mine);
      const volatile float* last = mine.data_ptr<float>() + 399'999;
      for (int i = 0; i < 20'000 && *last != 10.0f; ++i) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_EQ(*last, 10.0f);
      work->wait(seconds(60));
      EXPECT_TRUE(mine.eq(10).all().item<bool>());
    }
  }));
}

// Gradients are laid where the ranks of a machine read them: what lies elsewhere is copied there first.
TEST(WorldOverMachines, AllocatesWhatItCarriesInTheMachinesMemory) {
  expect_all_well(on_machines({2, 1}, [](int rank, const Backend& backend, Wire&) {
    const World world = World::adopt(backend, nullptr);
    Group group = data_group(world);
    EXPECT_TRUE(group.owns_memory(at::kCPU));
    EXPECT_FALSE(group.owns_memory(at::Device(at::kCUDA, 0)));
    const at::Tensor mine = group.allocate(1000, at::TensorOptions(at::kFloat)).fill_(1.0 + rank);
    group.all_reduce(mine).wait({.detail = "a test"});
    EXPECT_TRUE(mine.eq(6).all().item<bool>());
    world.barrier();
  }));
}

// In this order the partial sums show: (1 + 2²⁴) + (1 − 2²⁴) by machine, where in the order of the ranks one would be lost.
TEST(Hierarchy, SumsByMachineToTheSameBitsOnEveryRank) {
  const std::vector<float> values{1.0f, 16'777'216.0f, -16'777'216.0f, 1.0f};
  const float expected = (values[0] + values[1]) + (values[2] + values[3]);
  for (int turn = 0; turn < 5; ++turn) {
    expect_all_well(on_machines({2, 2}, [&](int rank, const Backend& backend, Wire&) {
      const at::Tensor mine = at::full({1000}, values[static_cast<size_t>(rank)]);
      all_reduce(*backend, mine)->wait(seconds(60));
      EXPECT_TRUE(mine.eq(expected).all().item<bool>());
    }));
  }
}

// What crosses is one machine's worth, whatever the number of its ranks: only first ranks send, and each as much as if it
// were alone on its machine.
TEST(Hierarchy, OneStreamPerMachineCrosses) {
  constexpr int64_t numel = 12'000;
  constexpr int64_t bytes = numel * 4;
  for (const int each : {1, 2, 4}) {
    for (const int machines : {2, 3}) {
      const int size = each * machines;
      expect_all_well(on_machines(std::vector<int>(machines, each), [&](int rank, const Backend& backend, Wire& wire) {
        const bool first = rank % each == 0;
        const auto crossed = [&](const auto& call) {
          const Wire::Count before = total(wire);
          call();
          const Wire::Count after = total(wire);
          EXPECT_EQ(after.messages - before.messages > 0, first);
          EXPECT_EQ(after.rounds - before.rounds > 0, first);
          return after.bytes - before.bytes;
        };
        const at::Tensor whole = at::ones({numel});
        EXPECT_EQ(crossed([&] { all_reduce(*backend, whole)->wait(seconds(60)); }),
                  first ? 2 * bytes * (machines - 1) / machines : 0);
        at::Tensor shard = at::ones({numel / size}), full = at::ones({numel});
        EXPECT_EQ(crossed([&] { backend->_reduce_scatter_base(shard, full)->wait(seconds(60)); }),
                  first ? bytes * (machines - 1) / machines : 0);
        EXPECT_EQ(crossed([&] { backend->_allgather_base(full, shard)->wait(seconds(60)); }),
                  first ? bytes * (machines - 1) / machines : 0);
        EXPECT_EQ(crossed([&] { backend->gather(full, shard, 7)->wait(seconds(60)); }),
                  first ? bytes * (machines - 1) / machines : 0);
        // Of a tree, the rounds of whom it begins at: of the root's machine alone.
        for (const int root : {0, size - 1}) {
          c10d::BroadcastOptions from;
          from.rootRank = root;
          std::vector<at::Tensor> one{whole};
          const int64_t before = total(wire).bytes;
          backend->broadcast(one, from)->wait(seconds(60));
          EXPECT_EQ(total(wire).bytes - before, first && rank / each == root / each ? bytes * (machines - 1) : 0);
        }
      }));
    }
  }
}

// Sums cross in the type that they are kept in; what is only carried crosses as it is.
TEST(Hierarchy, NarrowNumbersCrossAsWideSums) {
  constexpr int64_t numel = 1200;
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kLong}) {
    expect_all_well(on_machines({2, 1}, [&](int rank, const Backend& backend, Wire& wire) {
      const int64_t item = static_cast<int64_t>(c10::elementSize(dtype)), kept = std::max<int64_t>(item, 4);
      const auto crossed = [&](const auto& call) {
        const int64_t before = total(wire).bytes;
        call();
        return rank == 1 ? 0 : total(wire).bytes - before;
      };
      const int64_t others = rank == 0 ? 1 : 2;  // ranks of the other machine
      const at::Tensor whole = at::ones({numel}, dtype);
      EXPECT_EQ(crossed([&] { all_reduce(*backend, whole)->wait(seconds(60)); }), rank == 1 ? 0 : numel * kept);
      at::Tensor shard = at::ones({numel / 3}, dtype), full = at::ones({numel}, dtype);
      EXPECT_EQ(crossed([&] { backend->_reduce_scatter_base(shard, full)->wait(seconds(60)); }),
                rank == 1 ? 0 : others * (numel / 3) * kept);
      EXPECT_EQ(crossed([&] { backend->_allgather_base(full, shard)->wait(seconds(60)); }),
                rank == 1 ? 0 : (3 - others) * (numel / 3) * item);
    }));
  }
}

// Two ranks of one machine, or of two, that gather different things of one size: nobody's memory is filled, nothing ends.
TEST(Hierarchy, GathersThatDifferNeverFillEachOthersMemory) {
  for (const int astray : {1, 2}) {
    expect_all_well(on_machines({2, 2}, [&](int rank, const Backend& backend, Wire&) {
      at::Tensor shard = at::full({100}, 1.0 + rank), full = at::zeros({400});
      const auto work = backend->gather(full, shard, rank == astray ? 8 : 7);
      std::this_thread::sleep_for(milliseconds(300));
      EXPECT_FALSE(work->isCompleted());
      for (int r = 0; r < 4; ++r) {
        const bool together = r / 2 == rank / 2 && !(astray / 2 == rank / 2);
        if (r == rank || together) continue;
        EXPECT_TRUE(full.narrow(0, r * 100, 100).eq(0).all().item<bool>()) << r;
      }
      backend->shutdown();
    }));
  }
}

TEST(Hierarchy, CollectivesThatDifferBetweenMachinesAreAnErrorOnTheirFirstRanks) {
  const auto thrown = on_machines({2, 2}, [](int rank, const Backend& backend, Wire&) {
    std::vector<at::Tensor> one{at::ones({100})};
    const auto work = rank < 2 ? backend->allreduce(one) : backend->broadcast(one);
    work->wait(seconds(rank % 2 == 0 ? 60 : 1));
  });
  // Whoever sees it first closes its connections, which may be all that the other sees.
  const std::string told = thrown[0] + thrown[2];
  EXPECT_THAT(told, AllOf(HasSubstr("between the first ranks of machines: rank "), Not(HasSubstr("rank 1")),
                          Not(HasSubstr("rank 3"))));
  EXPECT_THAT(told, HasSubstr("same collectives in the same order"));
  EXPECT_NE(thrown[0], "");
  EXPECT_NE(thrown[2], "");
}

TEST(Hierarchy, CollectivesThatDifferInsideAMachineNameTheirRanks) {
  const auto thrown = on_machines({2, 2}, [](int rank, const Backend& backend, Wire&) {
    std::vector<at::Tensor> one{at::ones({rank == 3 ? 99 : 100})};
    backend->allreduce(one)->wait(seconds(rank > 1 ? 60 : 1));
  });
  for (const size_t rank : {2, 3}) {
    EXPECT_THAT(thrown[rank], HasSubstr("rank 2 called all_reduce(sum) of 100 Float where rank 3"));
  }
}

TEST(Hierarchy, WhatCannotBeCarriedIsRefusedBeforeAnybodyWaits) {
  expect_all_well(on_machines({2, 1}, [](int, const Backend& backend, Wire&) {
    at::Tensor four = at::ones({4}), one = at::ones({1}), wide = at::ones({3}, at::kDouble),
               gaps = at::ones({3, 2}).t();
    at::Tensor three = at::ones({3}), two = at::ones({2});
    EXPECT_THROW(backend->gather(four, one, 7), Error);
    EXPECT_THROW(backend->gather(wide, one, 7), Error);
    EXPECT_THROW(backend->gather(gaps, two, 7), Error);
    EXPECT_THROW(backend->_allgather_base(four, one), Error);
    EXPECT_THROW(backend->_reduce_scatter_base(one, four), Error);
    EXPECT_THROW(backend->_reduce_scatter_base(one, wide), Error);
    EXPECT_THROW(all_reduce(*backend, gaps), Error);
    EXPECT_THROW(all_reduce(*backend, at::ones({3}, at::kBool)), Error);
    for (const int root : {-1, 3}) {
      std::vector<at::Tensor> tensor{three};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      EXPECT_THROW(backend->broadcast(tensor, options), Error);
    }
    all_reduce(*backend, three)->wait(seconds(60));
    EXPECT_TRUE(three.eq(3).all().item<bool>());
  }));
}

TEST(Hierarchy, EndsAtOnceThoughCallsAreUnderWay) {
  const auto begin = std::chrono::steady_clock::now();
  expect_all_well(on_machines({2, 2}, [](int rank, const Backend& backend, Wire&) {
    if (rank == 3) return;  // never comes
    (void)all_reduce(*backend, at::ones({100'000}));
  }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20));
}

// ---- who is where

TEST(Machines, AreToldInATextThatDoesNotGrowWithEqualMachines) {
  for (const std::vector<int>& of : {std::vector{0, 0, 1, 1}, {0}, {0, 1, 2}, {0, 1, 0, 1}, {0, 0, 0, 1, 2, 2}}) {
    const Machines decoded = Machines::decode(Machines(of).encode());
    for (size_t r = 0; r < of.size(); ++r) EXPECT_EQ(decoded.of(static_cast<int>(r)), of[r]);
  }
  std::vector<int> many;
  for (int r = 0; r < 4096; ++r) many.push_back(r / 8);
  EXPECT_EQ(Machines(many).encode(), "0,8,512;");
}

TEST(Machines, MakeTiersWhereRanksOfOneFollowEachOther) {
  const Machines uneven({0, 1, 1, 1, 2, 2});
  const auto tiers = uneven.tiers({0, 1, 2, 3, 4, 5});
  ASSERT_TRUE(tiers);
  EXPECT_EQ(tiers->first, (std::vector{0, 1, 4, 6}));
  EXPECT_EQ(tiers->machine_of(0), 0);
  EXPECT_EQ(tiers->machine_of(3), 1);
  EXPECT_EQ(tiers->machine_of(4), 2);
  EXPECT_EQ(uneven.ranks_each(), 0);
  EXPECT_EQ(uneven.tiers({1, 2, 4})->first, (std::vector{0, 2, 3}));
  EXPECT_FALSE(uneven.tiers({1, 2, 3}));  // one machine
  EXPECT_FALSE(uneven.tiers({0, 1, 4}));  // no two together
  EXPECT_FALSE(uneven.tiers({1, 0, 2}));  // astray
  EXPECT_EQ(Machines({0, 0, 1, 1}).ranks_each(), 2);
  EXPECT_EQ(Machines({0, 1, 0, 1}).ranks_each(), 0);
  EXPECT_EQ(Machines::apart(3).ranks_each(), 1);
}

}  // namespace
}  // namespace plumb::testing

// The groups of a mesh, and memory that ranks read in place: who is in which, in which order, and what they see there.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <set>

#include "backend/tcp.h"
#include "plumb/error.h"
#include "plumb/world.h"
#include "world/group.h"
#include "world/support/plain.h"
#include "world/support/threads.h"
#include "world/world_impl.h"

namespace plumb::testing {
namespace {

const Where here{.detail = "a test"};

// The world's ranks in this group, in its order.
std::vector<int64_t> members(Group group, int rank) {
  const int64_t mine = rank;
  std::vector<int64_t> all;
  for (const auto& one : group.exchange({&mine, 1}, here)) all.push_back(one.at(0));
  return all;
}

TEST(Groups, FollowTheMesh) {
  for (int size = 1; size <= 6; ++size) {
    for (int shard = 1; shard <= size; ++shard) {
      if (size % shard != 0) continue;
      const Mesh mesh{.replicate = size / shard, .shard = shard};
      run_local(size, [&](World world) {
        for (int engine = 0; engine < 2; ++engine) {  // the second engine's are groups of its own
          const Groups groups = new_groups(world, mesh);
          const int me = world.rank();
          std::vector<int64_t> everybody, shards, replicas;
          for (int r = 0; r < size; ++r) {
            everybody.push_back(r);
            if (r / shard == me / shard) shards.push_back(r);
            if (r % shard == me % shard) replicas.push_back(r);
          }
          EXPECT_EQ(members(groups.data, me), everybody);
          EXPECT_EQ(members(groups.control, me), everybody);
          EXPECT_EQ(members(groups.shard, me), shards);
          EXPECT_EQ(members(groups.shard_control, me), shards);
          EXPECT_EQ(members(groups.replicate, me), replicas);
          EXPECT_EQ(groups.shard.rank(), me % shard);
          EXPECT_EQ(groups.shard.size(), shard);
          EXPECT_EQ(groups.replicate.rank(), me / shard);
          EXPECT_EQ(groups.replicate.size(), size / shard);
        }
      });
    }
  }
}

// Whoever made the backend has use for it before, beside and behind the world.
TEST(Groups, OfAWorldThatEndsLeaveAnAdoptedBackendToItsOwner) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  expect_all_well(on_threads(2, [&](int rank) {
    const auto backend = make_tcp_backend(store, rank, 2, "127.0.0.1", std::chrono::microseconds(50));
    for (int turn = 0; turn < 2; ++turn) {
      {
        const World world = World::adopt(backend, turn == 0 ? store : nullptr);
        EXPECT_EQ(world.rank(), rank);
        EXPECT_EQ(world.size(), 2);
        EXPECT_EQ(world.backend(), "tcp");
        EXPECT_EQ(members(data_group(world), rank), (std::vector<int64_t>{0, 1}));
      }
      std::vector<at::Tensor> mine{at::full({5}, 1.0 + rank)};
      backend->allreduce(mine)->wait(std::chrono::seconds(60));
      EXPECT_TRUE(mine[0].eq(3).all().item<bool>());
    }
  }));
}

// Where two ranks have no messages of their own, as in shared memory, host messages are carried as collectives.
TEST(Groups, TellEachOtherTheSameWhateverCarriesIt) {
  constexpr int size = 3;
  for (const std::string name : {"shm", "tcp", "gloo"}) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    expect_all_well(on_threads(size, [&](int rank) {
      const World world = World::join(store, rank, size, {.backend = name});
      EXPECT_EQ(world.backend(), name);
      for (Group group : {data_group(world), control_group(world)}) {
        EXPECT_EQ(members(group, rank), (std::vector<int64_t>{0, 1, 2}));
        const std::vector<int64_t> bits = {int64_t{1} << rank, ~(int64_t{1} << rank)};
        const Group::Combined all = group.combine(bits, std::vector<double>{0.5 * rank, 2.0, -1.0 * rank}, here);
        EXPECT_EQ(all.any, (std::vector<int64_t>{7, -1}));
        EXPECT_EQ(all.every, (std::vector<int64_t>{0, ~int64_t{7}}));
        EXPECT_EQ(all.sums, (std::vector<double>{1.5, 6.0, -3.0}));
      }
      world.barrier();
    }));
  }
}

// Two engines' collectives, and an axis's data and messages, are issued in any order: they never meet each other.
TEST(Groups, OfTwoEnginesAndOfOneAxisNeverMix) {
  run_local(4, [](World world) {
    std::vector<Groups> engines{new_groups(world, {2, 2}), new_groups(world, {2, 2})};
    const int me = world.rank();
    struct Issued {
      at::Tensor tensor;
      float right;
      Pending pending;
    };
    std::vector<Issued> issued(4);
    for (int i = 0; i < 4; ++i) {
      const int which = me % 2 == 0 ? i : 3 - i;  // the order differs between ranks; within a group it does not
      Group group = which % 2 == 0 ? engines[which / 2].shard : engines[which / 2].shard_control;
      Issued& one = issued[which];
      one.tensor = at::full({7}, static_cast<float>(100 * which + me));
      one.right = static_cast<float>(200 * which + (me / 2 * 4 + 1));
      one.pending = group.all_reduce(one.tensor);
    }
    for (auto& one : issued) {
      one.pending.wait(here);
      EXPECT_TRUE(at::equal(one.tensor, at::full({7}, one.right)));
    }
  });
}

// The same of what all ranks of an engine do together.
TEST(Groups, OfTwoEnginesOverTheWholeWorldNeverMix) {
  run_local(3, [](World world) {
    const int me = world.rank();
    std::vector<Group> groups;
    for (int engine = 0; engine < 2; ++engine) {
      const Groups own = new_groups(world, {1, 3});
      groups.insert(groups.end(), {own.data, own.control});
    }
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending(groups.size());
    for (int i = 0; i < 4; ++i) tensors.push_back(at::full({i % 2 == 0 ? 7 : 5}, static_cast<float>(100 * i + me)));
    for (int i = 0; i < 4; ++i) {
      const auto which = static_cast<size_t>((i + me) % 4);  // every rank begins with another one
      pending[which] = groups[which].all_reduce(tensors[which]);
    }
    for (size_t i = 0; i < 4; ++i) {
      pending[i].wait(here);
      EXPECT_TRUE(tensors[i].eq(static_cast<float>(300 * i + 3)).all().item<bool>()) << i;
    }
  });
}

// What ranks say of a wait is of one group: of two engines over the same ranks, neither is taken for the other.
TEST(Groups, AreCirclesOfTheirOwnWhichAllOfTheirRanksKnow) {
  run_local(3, [](World world) {
    World::Impl& impl = world.impl();
    std::vector<std::shared_ptr<Group::Impl>> all;
    for (int engine = 0; engine < 3; ++engine) {
      const World::Impl::Pair pair = impl.another(engine);
      all.insert(all.end(), {pair.data, pair.control});
    }
    for (const char* name : {"1/shard0", "2/shard0", "2/control-shard0"}) {
      all.push_back(impl.part(name, {0, 1, 2}, world.rank(), data_index));
    }
    std::set<int64_t> circles;
    for (const auto& one : all) {
      EXPECT_TRUE(circles.insert(one->circle).second);
      for (const auto& heard : Group(one).exchange({&one->circle, 1}, here)) EXPECT_EQ(heard.at(0), one->circle);
    }
  });
}

// Worlds may meet at one store, one after the other and at the same time.
TEST(Groups, OfWorldsThatMeetAtOneStoreNeverMix) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  expect_all_well(on_threads(2, [&](int rank) {
    const WorldOptions options{.timeout = std::chrono::seconds(20)};
    for (int turn = 0; turn < 2; ++turn) {
      const World one = World::join(store, rank, 2, options), other = World::join(store, rank, 2, options);
      at::Tensor first = at::full({3}, 1.0 + rank), second = at::full({4}, 10.0 + rank);
      Group one_group = data_group(one), other_group = data_group(other);
      Pending pending[2];
      if (rank == 0) pending[0] = one_group.all_reduce(first);
      pending[1] = other_group.all_reduce(second);
      if (rank == 1) pending[0] = one_group.all_reduce(first);
      for (Pending& each : pending) each.wait(here);
      EXPECT_TRUE(first.eq(3).all().item<bool>());
      EXPECT_TRUE(second.eq(21).all().item<bool>());
    }
  }));
}

TEST(Groups, ThreadsReadWhatTheOthersShareInPlaceAndItOutlivesItsOwner) {
  for (int size = 1; size <= 4; ++size) {
    for (const int64_t numel : {0, 1, 1000}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
        run_local(size, [&](World world) {
          Group group = data_group(world);
          const int me = world.rank();
          Group::Shared shared = group.share(numel, dtype, here);
          shared.mine.copy_(varied(numel, dtype, static_cast<uint32_t>(me)));
          world.barrier();
          ASSERT_EQ(static_cast<int>(shared.everybody.size()), size);
          if (me == 0) shared.mine.reset();
          for (int r = 0; r < size; ++r) {
            EXPECT_TRUE(same_bits(shared.everybody[r], varied(numel, dtype, static_cast<uint32_t>(r))));
          }
          world.barrier();
          if (me != 0 && numel > 0) {
            shared.mine.add_(1);  // seen by everybody
          }
          world.barrier();
          for (int r = 1; r < size; ++r) {
            EXPECT_TRUE(same_bits(shared.everybody[r], varied(numel, dtype, static_cast<uint32_t>(r)).add_(1)));
          }
        });
      }
    }
  }
}

// Whoever lets go as soon as he may, and takes memory of the same size for something else, changes nothing for the others.
TEST(Groups, ThreadsThatLetGoAtOnceTakeNothingFromTheOthers) {
  for (const int size : {2, 3}) {
    run_local(size, [](World world) {
      Group group = data_group(world);
      for (int turn = 0; turn < 400; ++turn) {
        const int leaver = turn % world.size();
        Group::Shared shared = group.share(16, at::kFloat, here);
        std::vector<at::Tensor> others;  // over storages that lie where the one was that is let go
        if (world.rank() == leaver) {
          shared.mine.fill_(7);
          shared = {};
          for (int i = 0; i < 8; ++i) others.push_back(at::full({16}, -1.0));
        }
        world.barrier();
        if (world.rank() != leaver) {
          EXPECT_TRUE(shared.everybody[leaver].eq(7).all().item<bool>()) << "turn " << turn;
        }
      }
      world.barrier();
    });
  }
}

}  // namespace
}  // namespace plumb::testing

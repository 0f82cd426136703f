// Worlds of threads over every carrier: each group carries every verb among its own ranks, what crosses is counted as what it
// is, and whoever fails or leaves is told by its number.
#include <c10/util/Logging.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdlib>
#include <mutex>
#include <regex>
#include <set>

#include "backend/machines.h"
#include "plumb/error.h"
#include "plumb/world.h"
#include "watch/wire.h"
#include "world/group.h"
#include "world/support/threads.h"

namespace plumb::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const Where here{.detail = "a test"};

class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

// What each rank threw.
std::vector<std::string> joined(int size, const std::function<WorldOptions(int rank)>& options,
                                const std::function<void(const World&)>& body) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  return on_threads(size, [&](int rank) {
    const World world = World::join(store, rank, size, options(rank));
    body(world);
  });
}
std::vector<std::string> joined(int size, const WorldOptions& options, const std::function<void(const World&)>& body) {
  return joined(size, [&](int) { return options; }, body);
}

// Every verb among `members`, whose ranks in the world are these; each has values of its own.
void check_verbs(Group group, const std::vector<int64_t>& members, int me) {
  const int size = group.size();
  ASSERT_EQ(static_cast<size_t>(size), members.size());
  ASSERT_EQ(members[group.rank()], me);
  const auto of = [](int64_t rank, int64_t numel) { return (at::arange(numel) + 1) * (rank + 1); };
  for (const int64_t each : {1, 3, 2000}) {
    const int64_t whole = each * size;
    at::Tensor sum = of(me, whole), right = at::zeros({whole}, at::kLong);
    for (const int64_t r : members) right += of(r, whole);
    group.all_reduce(sum).wait(here);
    EXPECT_TRUE(sum.equal(right));
    at::Tensor shard = at::zeros({each}, at::kLong), full = of(me, whole);
    group.reduce_scatter(shard, full).wait(here);
    EXPECT_TRUE(shard.equal(right.narrow(0, group.rank() * each, each)));
    std::vector<at::Tensor> all;
    for (const int64_t r : members) all.push_back(of(r, each));
    at::Tensor gathered = at::zeros({whole}, at::kLong);
    group.all_gather(gathered, of(me, each)).wait(here);
    EXPECT_TRUE(gathered.equal(at::cat(all)));
    for (int root = 0; root < size; ++root) {
      at::Tensor told = of(me, each);
      group.broadcast(told, root).wait(here);
      EXPECT_TRUE(told.equal(of(members[root], each)));
    }
  }
  // What is only carried has any dtype.
  for (const auto dtype : {at::kBool, at::kChar, at::kShort, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
    const auto values = [&](int64_t rank) { return (at::arange(5) + rank).remainder(3).to(dtype); };
    std::vector<at::Tensor> all, sent, received;
    for (int r = 0; r < size; ++r) {
      at::Tensor told = values(me);
      group.broadcast(told, r).wait(here);
      EXPECT_TRUE(told.equal(values(members[r]))) << dtype;
      all.push_back(values(members[r]));
      sent.push_back(values(me + 2 * members[r]));
      received.push_back(values(members[r] + 2 * me));
    }
    at::Tensor gathered = at::zeros({5 * size}, dtype);
    group.all_gather(gathered, values(me)).wait(here);
    EXPECT_TRUE(gathered.equal(at::cat(all))) << dtype;
    EXPECT_TRUE(group.all_to_all(at::cat(sent), here).equal(at::cat(received))) << dtype;
  }
  group.barrier().wait(here);
}

struct Setting {
  std::string asked, machines, shm;  // the last two are variables
  int size;
  Mesh mesh;
  std::string backend;  // that carries it
  int ranks_each;
};

TEST(Carried, EveryVerbAmongTheRanksOfEveryGroup) {
  const Setting settings[] = {{"shm", "", "", 4, {2, 2}, "shm", 4},     {"tcp", "", "", 4, {2, 2}, "tcp", 4},
                              {"gloo", "", "", 4, {2, 2}, "gloo", 4},   {"", "", "", 3, {1, 3}, "shm", 3},
                              {"", "", "0", 3, {3, 1}, "tcp", 1},       {"", "2", "", 4, {2, 2}, "shm+tcp", 2},
                              {"", "2", "", 4, {1, 4}, "shm+tcp", 2},   {"", "2", "", 6, {2, 3}, "shm+tcp", 3},
                              {"", "1,2", "", 3, {1, 3}, "shm+tcp", 0}, {"", "2,1", "", 3, {3, 1}, "shm+tcp", 0},
                              {"", "3,1", "", 4, {2, 2}, "shm+tcp", 0}, {"tcp", "2", "", 4, {2, 2}, "tcp", 2},
                              {"", "3", "", 3, {1, 3}, "tcp", 1}};
  for (const Setting& setting : settings) {
    SCOPED_TRACE("asked for '" + setting.asked + "', machines '" + setting.machines + "', of " +
                 std::to_string(setting.size));
    const Variable machines("PLUMB_MACHINES", setting.machines), shm("PLUMB_SHM", setting.shm);
    std::mutex mutex;
    Wire::Counts sent{};  // by all ranks, for data
    expect_all_well(joined(setting.size, {.backend = setting.asked}, [&](const World& world) {
      EXPECT_EQ(world.backend(), setting.backend);
      EXPECT_EQ(ranks_per_machine(world), setting.ranks_each);
      const int me = world.rank(), size = world.size(), shard = static_cast<int>(setting.mesh.shard);
      std::vector<int64_t> everybody, shards, replicas;
      for (int r = 0; r < size; ++r) {
        everybody.push_back(r);
        if (r / shard == me / shard) shards.push_back(r);
        if (r % shard == me % shard) replicas.push_back(r);
      }
      for (int engine = 0; engine < 2; ++engine) {
        Groups groups = new_groups(world, setting.mesh);
        check_verbs(groups.data, everybody, me);
        check_verbs(groups.shard, shards, me);
        check_verbs(groups.replicate, replicas, me);
        const int64_t mine = me;
        for (const auto& [group, members] :
             {std::pair(&groups.control, &everybody), {&groups.shard_control, &shards}}) {
          std::vector<int64_t> heard;
          for (const auto& one : group->exchange({&mine, 1}, here)) heard.push_back(one.at(0));
          EXPECT_EQ(heard, *members);
        }
      }
      std::vector<std::string> right;
      for (int r = 0; r < size; ++r) {
        right.push_back(std::string(static_cast<size_t>(7 * r), 'x') + '\0' + std::to_string(r));
      }
      EXPECT_EQ(exchange_text(world, right[me], here), right);
      EXPECT_EQ(exchange_text(world, "", here), std::vector<std::string>(size));
      world.barrier();
      const Wire::Counts before = wire_counts(world);
      at::Tensor data = at::ones({5000});
      data_group(world).all_reduce(data).wait(here);
      const Wire::Counts after = wire_counts(world);
      EXPECT_TRUE(data.eq(size).all().item<bool>());
      {
        std::lock_guard lock(mutex);
        for (const Cargo cargo : {Cargo::data, Cargo::control, Cargo::gather}) {
          const auto kind = static_cast<size_t>(cargo);
          sent[kind].bytes += (after[kind] - before[kind]).bytes;
        }
      }
      world.barrier();
    }));
    EXPECT_GT(sent[static_cast<size_t>(Cargo::data)].bytes, 0);
    EXPECT_EQ(sent[static_cast<size_t>(Cargo::control)].bytes, 0);
    EXPECT_EQ(sent[static_cast<size_t>(Cargo::gather)].bytes, 0);
  }
}

// ---- what it costs, as rings, trees and messages to each do it

TEST(Carried, EveryVerbIsCountedByItsRoundsMessagesAndBytes) {
  for (const std::string name : {"local", "shm", "tcp", "gloo"}) {
    for (const int size : {2, 3, 5}) {
      const auto body = [&](const World& world) {
        Group group = data_group(world);
        const auto cost = [&](const std::function<void()>& call) {
          const auto kind = static_cast<size_t>(Cargo::data);
          const Wire::Count before = wire_counts(world)[kind];
          call();
          return wire_counts(world)[kind] - before;
        };
        const auto expect = [&](const char* verb, const Wire::Count& found, int64_t rounds, int64_t messages,
                                int64_t bytes) {
          EXPECT_EQ(found.rounds, name == "shm" ? 1 : rounds) << verb << " " << name << " " << size;
          EXPECT_EQ(found.messages, messages) << verb << " " << name << " " << size;
          EXPECT_EQ(found.bytes, bytes) << verb << " " << name << " " << size;
          EXPECT_EQ(found.waits, 1) << verb;
        };
        const int64_t n = size, part = 8, depth = n == 2 ? 1 : n == 3 ? 2 : 3;
        const bool direct = name == "tcp";
        at::Tensor whole = at::ones({n * part}), shard = at::ones({part});
        const int64_t bytes = part * 4;
        expect("all_reduce", cost([&] { group.all_reduce(whole).wait(here); }), direct ? 2 : 2 * (n - 1), 2 * (n - 1),
               2 * (n - 1) * bytes);
        expect("all_gather", cost([&] { group.all_gather(whole, shard).wait(here); }), direct ? 1 : n - 1, n - 1,
               (n - 1) * bytes);
        expect("reduce_scatter", cost([&] { group.reduce_scatter(shard, whole).wait(here); }),
               direct || name == "gloo" ? 1 : n - 1, n - 1, (n - 1) * bytes);
        expect("all_to_all", cost([&] { group.all_to_all(whole, here); }), 1, n - 1, (n - 1) * bytes);
        expect("broadcast", cost([&] { group.broadcast(shard, 0).wait(here); }), depth, depth, depth * bytes);
        expect("barrier", cost([&] { group.barrier().wait(here); }), depth, depth, 0);
        world.barrier();
      };
      if (name == "local") {
        run_local(size, body);
      } else {
        expect_all_well(joined(size, {.backend = name}, body));
      }
    }
  }
}

// ---- who is told

TEST(Told, ARankWhoseProgramThrewByItsNumber) {
  for (const char* backend : {"shm", "tcp"}) {
    const auto thrown = joined(3, {.backend = backend}, [](const World& world) {
      world.barrier();
      if (world.rank() == 1) throw std::runtime_error("enough");
      world.barrier();
    });
    EXPECT_EQ(thrown[1], "enough");
    for (const int r : {0, 2}) {
      const std::string me = "plumb: rank " + std::to_string(r) + ": ";
      // Of the other that was told before, or of the one itself.
      EXPECT_THAT(thrown[r],
                  AnyOf(StartsWith(me + "rank 1 failed: its program was ended by an exception (this rank was "
                                        "in the set-up (barrier))"),
                        StartsWith(me + "rank " + std::to_string(2 - r) +
                                   " failed: rank 1 failed: its program was ended by an exception")))
          << backend;
    }
  }
}

TEST(Told, ARankThatLeftByItsNumber) {
  for (const char* backend : {"shm", "tcp"}) {
    const auto thrown = joined(2, {.backend = backend}, [](const World& world) {
      world.barrier();
      if (world.rank() == 0) world.barrier();
    });
    EXPECT_EQ(thrown[1], "");
    EXPECT_THAT(thrown[0], AllOf(StartsWith("plumb: rank 0: "), HasSubstr("rank 1"), HasSubstr("left the world")));
  }
}

TEST(Told, ShapesAndDtypesAsTheProgramKnowsThem) {
  const auto thrown = joined(2, {.backend = "shm"}, [](const World& world) {
    const int64_t each = 2 + world.rank();
    data_group(world).all_gather(at::ones({2 * each}), at::ones({each})).wait(here);
  });
  for (const std::string& text : thrown) {
    EXPECT_THAT(text, HasSubstr("rank 0 called all_gather of 2 Float where rank 1 called all_gather of 3 Float"));
  }
}

// The numbers of all "rank N" in a text.
std::set<int> ranks_named(const std::string& text) {
  std::set<int> found;
  const std::regex named("rank (\\d+)");
  for (std::sregex_iterator at(text.begin(), text.end(), named); at != std::sregex_iterator(); ++at) {
    found.insert(std::stoi((*at)[1]));
  }
  return found;
}

// Whoever talks along an axis of the mesh is known by his number in the world, whatever goes wrong there and whoever sees it.
TEST(Told, TheRanksOfAnAxisAsTheWorldNumbersThem) {
  struct Row {
    std::string backend, machines;
    Mesh mesh;
  };
  using Call = std::function<void(Group & group, bool last)>;
  const std::pair<std::string, Call> wrongs[] = {
      {"sizes that differ", [](Group& group, bool last) { group.all_reduce(at::ones({last ? 3 : 2})).wait(here); }},
      {"large sizes that differ",
       [](Group& group, bool last) { group.all_reduce(at::ones({last ? 3'000'000 : 2'000'000})).wait(here); }},
      {"verbs that differ",
       [](Group& group, bool last) {
         const at::Tensor mine = at::ones({4}), all = at::ones({4 * group.size()});
         (last ? group.all_gather(all, mine) : group.reduce_scatter(mine, all)).wait(here);
       }},
      {"roots that differ",
       [](Group& group, bool last) {
         at::Tensor mine = at::ones({4});
         group.broadcast(mine, last ? 0 : 1).wait(here);
       }},
      {"a tensor with gaps", [](Group& group, bool) { group.all_reduce(at::ones({2, 3}).t()).wait(here); }},
      {"parts that do not fit", [](Group& group, bool) { group.all_gather(at::ones({5}), at::ones({3})).wait(here); }},
      {"a root that is none", [](Group& group, bool) { group.broadcast(at::ones({5}), group.size()).wait(here); }},
      {"an exception",
       [](Group& group, bool last) {
         if (last) throw std::runtime_error("enough");
         group.all_reduce(at::ones({2})).wait(here);
       }},
      {"a rank that leaves",
       [](Group& group, bool last) {
         if (!last) group.all_reduce(at::ones({2})).wait(here);
       }},
  };
  for (const Row& row : {Row{"shm", "", {2, 2}}, {"tcp", "", {2, 2}}, {"", "2", {3, 2}}, {"local", "", {2, 2}}}) {
    const Variable machines("PLUMB_MACHINES", row.machines);
    const int size = static_cast<int>(row.mesh.shard * row.mesh.replicate), shard = static_cast<int>(row.mesh.shard);
    for (const bool along_shard : {true, false}) {
      std::set<int> members;  // of the axis that the last rank is of
      for (int r = 0; r < size; ++r) {
        if (along_shard ? r / shard == size / shard - 1 : r % shard == shard - 1) members.insert(r);
      }
      for (const auto& [wrong, call] : wrongs) {
        const bool quiet = wrong == "an exception" || wrong == "a rank that leaves";  // on the last
        // Between machines, two that each expect the other's numbers both wait: nobody is told before the time-out.
        if (wrong == "roots that differ" && row.backend != "shm" && row.backend != "local") continue;
        if (quiet && (along_shard || row.backend == "shm")) continue;  // it takes seconds until somebody is asked
        SCOPED_TRACE(row.backend + row.machines + (along_shard ? ", shard, " : ", replicate, ") + wrong);
        std::vector<std::string> thrown(size);
        const auto body = [&](const World& world) {
          Groups groups = new_groups(world, row.mesh);
          world.barrier();
          if (!members.contains(world.rank())) return;
          try {
            call(along_shard ? groups.shard : groups.replicate, world.rank() == size - 1);
          } catch (const Error& error) {
            thrown[world.rank()] = error.what();
            throw;
          }
        };
        if (row.backend == "local") {
          try {
            run_local(size, body);
          } catch (const std::exception&) {
          }
        } else {
          joined(size, {.backend = row.backend}, body);
        }
        for (const int r : members) {
          if (quiet && r == size - 1) continue;
          EXPECT_THAT(thrown[r], StartsWith("plumb: rank " + std::to_string(r) + ": "));
          if (wrong == "a root that is none") continue;  // which has a number in the axis alone
          for (const int named : ranks_named(thrown[r])) {
            EXPECT_TRUE(members.contains(named)) << named << " in: " << thrown[r];
          }
          if (quiet) {
            EXPECT_TRUE(ranks_named(thrown[r]).contains(size - 1)) << thrown[r];
          }
        }
      }
    }
  }
}

// A world that has failed sends nothing more.
TEST(Told, WhatItFailedWithWhateverItBeginsNext) {
  run_local(2, [](World world) {
    world.barrier();
    report_failure(world, "out of luck", here);
    const auto sent = [&] {
      int64_t messages = 0;
      for (const Wire::Count& count : wire_counts(world)) messages += count.messages;
      return messages;
    };
    const int64_t before = sent();
    Group data = data_group(world), control = control_group(world);
    const std::vector<int64_t> words{1, 2};
    const std::function<void()> calls[] = {[&] { control.exchange(words, here); },
                                           [&] { control.combine(words, {}, here); },
                                           [&] { control.gather({{at::ones({2}), at::ones({4})}}, 7); },
                                           [&] { data.all_reduce(at::ones({3})); },
                                           [&] { data.broadcast(at::ones({3}), 1); },
                                           [&] { world.barrier(); }};
    for (const auto& call : calls) {
      try {
        call();
        ADD_FAILURE() << "it was carried";
      } catch (const Error& error) {
        EXPECT_EQ(error.what(),
                  "plumb: rank " + std::to_string(world.rank()) + ": an earlier failure ended this world: out of luck");
      }
    }
    EXPECT_EQ(sent(), before);
  });
}

// ---- what is asked for

TEST(Asked, WhatNobodyHasIsRefusedBeforeAnybodyIsMet) {
  const std::pair<WorldOptions, std::string> table[] = {
      {{.device = "tpu"}, "device 'tpu' is unknown; there are 'cpu' and 'cuda'"},
      {{.timeout = std::chrono::milliseconds(0)}, "a time-out of 0 ms; it must be positive"},
      {{.timeout = std::chrono::milliseconds(-5)}, "a time-out of -5 ms; it must be positive"},
      {{.backend = "local"}, "backend 'local' is for ranks that are threads of one process"},
      {{.backend = "mpi"}, "backend 'mpi' is unknown; there are 'shm', 'tcp', 'gloo' and 'nccl'"},
      {{.backend = "shm", .device = "cuda"}, "backend 'shm' carries gradients on 'cpu', and the device is 'cuda'"},
      {{.backend = "tcp", .device = "cuda"}, "backend 'tcp' carries gradients on 'cpu', and the device is 'cuda'"},
      {{.backend = "nccl"}, "backend 'nccl' carries gradients on 'cuda', and the device is 'cpu'"}};
  for (const auto& [options, why] : table) {
    for (const int rank : {0, 1}) {
      try {
        World::join(c10::make_intrusive<c10d::HashStore>(), rank, 2, options);
        ADD_FAILURE() << why;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), StartsWith("plumb: rank " + std::to_string(rank) + ": " + why));
      }
    }
  }
}

TEST(Asked, ByOneIsTakenByWhoLeftItOpenAndTwoThatDifferAreTold) {
  for (int asks = 0; asks < 3; ++asks) {
    expect_all_well(joined(
        3, [&](int rank) { return WorldOptions{.backend = rank == asks ? "tcp" : ""}; },
        [](const World& world) {
          EXPECT_EQ(world.backend(), "tcp");
          world.barrier();
        }));
  }
  for (const auto& [first, second] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 2)}) {
    const auto thrown = joined(
        3, [&](int rank) { return WorldOptions{.backend = rank == first    ? "tcp"
                                                          : rank == second ? "gloo"
                                                                           : ""}; },
        [](const World&) {});
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(thrown[r], "plumb: rank " + std::to_string(r) + ": rank " + std::to_string(first) +
                               " asked for backend 'tcp' and rank " + std::to_string(second) +
                               " for 'gloo'; every rank must ask for the same");
    }
  }
}

// libtorch's own log is silent while the ranks meet, for their errors say it, and has its errors afterwards.
TEST(Asked, LibtorchIsHushedWhileRanksMeetAndNoLonger) {
  class Looking final : public c10d::PrefixStore {
   public:
    explicit Looking(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("", std::move(store)) {}
    int64_t add(const std::string& key, int64_t value) override {
      std::lock_guard lock(mutex);
      if (key.find("joined/") != std::string::npos && level < 0) level = FLAGS_caffe2_log_level;
      return PrefixStore::add(key, value);
    }
    std::mutex mutex;
    int level = -1;
  };
  if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) GTEST_SKIP() << "the user's own level stands";
  const int before = FLAGS_caffe2_log_level;
  const auto store = c10::make_intrusive<Looking>(c10::make_intrusive<c10d::HashStore>());
  expect_all_well(on_threads(2, [&](int rank) {
    const World world = World::join(store, rank, 2, {.backend = "shm"});
    world.barrier();
    EXPECT_EQ(FLAGS_caffe2_log_level, 2);
    world.barrier();
  }));
  EXPECT_EQ(store->level, 3);
  FLAGS_caffe2_log_level = 0;
  {
    const Variable own("TORCH_CPP_LOG_LEVEL", "INFO");
    expect_all_well(joined(2, {.backend = "shm"}, [](const World& world) { world.barrier(); }));
    EXPECT_EQ(FLAGS_caffe2_log_level, 0);
  }
  FLAGS_caffe2_log_level = before;
}

}  // namespace
}  // namespace plumb::testing

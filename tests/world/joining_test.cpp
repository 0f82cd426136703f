// What joining costs by the number of ranks: messages to the store, and bytes from it.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <latch>
#include <thread>

#include "backend/machines.h"
#include "plumb/world.h"
#include "watch/wire.h"
#include "world/support/counting_store.h"

namespace plumb::testing {
namespace {

struct Joined {
  int64_t messages = 0;  // of the rank with most
  int64_t bytes = 0;     // to the rank with most, but for rank 0
};

// Ranks that are threads of this process, each with the sockets or the memory that a process would have.
Joined join(int size) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Joined> each(size);
  std::latch all(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto counting = c10::make_intrusive<CountingStore>(store);
      const World world = World::join(counting, rank, size);
      each[rank] = {counting->messages, counting->bytes};
      all.arrive_and_wait();
    });
  }
  for (auto& thread : threads) thread.join();
  Joined most;
  for (int rank = 0; rank < size; ++rank) {
    most.messages = std::max(most.messages, each[rank].messages);
    if (rank > 0) most.bytes = std::max(most.bytes, each[rank].bytes);
  }
  return most;
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* const name_;
};

TEST(Joining, TakesAsManyMessagesAndBytesWhateverTheNumberOfMachines) {
  const Environment apart("PLUMB_SHM", "0");
  const Environment interface("GLOO_SOCKET_IFNAME", "lo");
  const Joined two = join(2);
  for (const int size : {8, 32}) {
    const Joined joined = join(size);
    EXPECT_LE(joined.messages, two.messages + 10) << size;  // a barrier of log₂ N rounds makes so many connections
    EXPECT_LE(joined.bytes, two.bytes + 400) << size;
  }
}

TEST(Joining, TakesAsManyMessagesWhateverTheNumberOfRanksOfAMachine) {
  const Joined two = join(2);
  for (const int size : {8, 32}) EXPECT_LE(join(size).messages, two.messages + 4) << size;
}

// Who is where, and whether somebody objects: exactly as many for 64 ranks as for 4.
TEST(Joining, MachinesAreFoundInTheSameNumberOfMessagesWhateverTheNumberOfRanks) {
  for (const int size : {2, 4, 16, 64}) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto counting = c10::make_intrusive<CountingStore>(store);
        const Machines machines = Machines::find(*counting, rank, size);
        EXPECT_EQ(machines.count(), 1);
        EXPECT_EQ(machines.ranks_each(), size);
        EXPECT_EQ(first_objection(*counting, "test", size, rank == size - 1 ? "no" : ""), "no");
        EXPECT_LE(counting->messages, 10) << size;
        EXPECT_LE(rank > 0 ? counting->bytes : 0, 40) << size;
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

// A few a second, whether all is well or somebody is waited for: the same for 16 ranks as for 2.
TEST(Joining, TheStoreHearsAsManyMessagesPerRankAndSecondWhateverTheNumberOfRanks) {
  const Environment apart("PLUMB_SHM", "0");
  const Environment interface("GLOO_SOCKET_IFNAME", "lo");
  for (const int size : {2, 16}) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    std::latch all(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const World world = World::join(store, rank, size);
        const auto sent = [&] { return wire_counts(world)[static_cast<size_t>(Cargo::store)].messages; };
        const auto begin = std::chrono::steady_clock::now();
        const int64_t before = sent();
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // the others wait for it
        world.barrier();
        const int64_t more = sent() - before;
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        EXPECT_GE(more, 1) << "rank " << rank << " of " << size;
        // Beats and looks of one or two messages each; whoever asked for every rank's report would send 16 a look.
        EXPECT_LE(static_cast<double>(more), 6 * seconds + 6) << "rank " << rank << " of " << size;
        all.arrive_and_wait();
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace plumb::testing

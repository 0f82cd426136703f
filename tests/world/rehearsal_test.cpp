// The verbs of a group beside one process's own computation: over threads, shared memory and TCP.
#include "world/support/rehearsal.h"

#include <random>

#include "world/support/drill.h"
#include "world/support/processes.h"
#include "world/support/shm_threads.h"
#include "world/world_impl.h"

namespace plumb::testing {
namespace {

TEST(Rehearsal, ThreadsComputeWhatOneProcessDoes) {
  for (int size = 1; size <= 5; ++size) {
    const uint32_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(size) + " ranks");
    EXPECT_NO_THROW(run_local(size, [&](World world) { rehearse(world, seed, 120 / slowness); }));
  }
}

TEST(Rehearsal, TheLocalBackendCarriesEveryVerbDtypeAndLength) {
  for (const int size : {2, 5}) {
    EXPECT_NO_THROW(run_local(size, [](World world) { drill(*world.impl().data->backend); })) << size << " ranks";
  }
}

TEST(Rehearsal, ProcessesComputeWhatOneDoes) {
  const std::string seed = std::to_string(std::random_device()() >> 1);
  SCOPED_TRACE("PLUMB_TEST_SEED " + seed);
  const Variables seeded{{"PLUMB_TEST_SEED", seed}};
  for (Variables carrier : {Variables{{"PLUMB_TEST_BACKEND", "shm"}}, Variables{{"PLUMB_TEST_BACKEND", "gloo"}},
                            Variables{{"PLUMB_TEST_BACKEND", "tcp"}, {"PLUMB_SHM", "0"}}}) {
    carrier.insert(seeded.begin(), seeded.end());
    auto ranks = start_ranks("rehearse", 3, carrier);
    for (auto& rank : ranks) EXPECT_EQ(rank.join(std::chrono::seconds(180)), 0) << rank.output();
  }
}

}  // namespace
}  // namespace plumb::testing

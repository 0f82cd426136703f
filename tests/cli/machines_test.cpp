// Ranks spread over machines: shared memory inside, one stream between, and the same bits as on one machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/support/program.h"

namespace plumb::test {
namespace {

Result train(const std::string& strategy, const std::string& machines, const Words& more = {}) {
  Words words = tiny({"--json", "--batch", "8", "--eval-every", "0", "--questions", "8", "--deterministic",
                      "--virtual-ranks", "4", "--ranks", "4", "--strategy", strategy});
  words.insert(words.end(), more.begin(), more.end());
  return run(words, {{"PLUMB_MACHINES", machines}});
}

// Two of two ranks, and one of one rank beside one of three, where some axes of hsdp lie on one machine and others do not.
TEST(Machines, TrainToTheSameBitsWhereverTheirRanksAre) {
  for (const char* strategy : {"ddp", "zero3", "hsdp"}) {
    const Result together = train(strategy, "1");
    ASSERT_EQ(together.code, 0) << together.err;
    for (const char* machines : {"2", "1,3"}) {
      const Result spread = train(strategy, machines);
      ASSERT_EQ(spread.code, 0) << strategy << " on " << machines << ": " << spread.err;
      EXPECT_EQ(spread.last()["backend"], "shm+tcp");
      EXPECT_EQ(spread.last()["model_digest"], together.last()["model_digest"]) << strategy << " on " << machines;
    }
  }
}

// By default hsdp shards inside of machines, where shards are read in place, and replicates between them. (By its row alone it
// would have two replicas of three ranks.)
TEST(Machines, AreTheReplicasOfHsdp) {
  const auto gathered = [](const Words& more) {
    Words words = tiny(
        {"--json", "--batch", "12", "--eval-every", "0", "--questions", "8", "--ranks", "6", "--strategy", "hsdp"});
    words.insert(words.end(), more.begin(), more.end());
    const Result result = run(words, {{"PLUMB_MACHINES", "3"}});
    EXPECT_EQ(result.code, 0) << result.err;
    return result.last()["wire"]["gather"]["bytes"].get<double>();
  };
  EXPECT_EQ(gathered({}), 0);
  EXPECT_GT(gathered({"--mesh", "replicate=2,shard=3"}), 0);
}

}  // namespace
}  // namespace plumb::test

// The engine on a real device: no host synchronisation in a step, and real streams that fill one bucket.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/plumb.h"
#include "scenarios/support/models.h"

#ifdef PLUMB_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

namespace plumb {
namespace {

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  }
};

struct NoSynchronisation {
  NoSynchronisation() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoSynchronisation() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

TEST_F(Cuda, ATrainingStepNeverWaitsForTheDevice) {
  for (const Strategy& row : strategies()) {
    torch::manual_seed(1);
    scenarios::Net net;
    net.to(at::kCUDA);
    Engine engine(World(), net, AdamW{.lr = 0.01}, {.strategy = row.name, .clip_norm = 0.5});
    const auto x = torch::randn({4, 6}, at::kCUDA);
    for (int step = 0; step < 6; ++step) {
      std::optional<NoSynchronisation> strict;
      if (step >= 3) strict.emplace();
      net.loss(x).backward();
      EXPECT_NO_THROW(engine.step()) << row.name << ", step " << step;
      engine.zero_grad();
    }
  }
}

// T1, T2, T5: branches on their own streams, slowed down so that whoever does not wait reads too early.
TEST_F(Cuda, StreamsThatFillOneBucketAreAllWaitedFor) {
  for (const bool slow : {false, true}) {
    std::vector<at::Tensor> results[2];
    for (const bool streams : {false, true}) {
      torch::manual_seed(2);
      auto net = std::make_shared<scenarios::Net>();
      net->to(at::kCUDA);
      Options options;
      options.bucket_bytes = 1 << 20;
      Engine engine(World(), *net, SGD{.lr = 0.1, .momentum = 0.9}, options);
      const auto side = at::cuda::getStreamFromPool();
      const auto another = at::cuda::getStreamFromPool();
      const auto home = at::cuda::getCurrentCUDAStream();
      auto run_on = [&](const at::cuda::CUDAStream& stream, const auto& body) {
        if (!streams) return body();
        at::cuda::CUDAEvent begun, ended;
        begun.record(home);
        begun.block(stream);
        at::Tensor result;
        {
          c10::cuda::CUDAStreamGuard guard(stream);
          if (slow) at::cuda::sleep(20'000'000);
          result = body();
        }
        ended.record(stream);
        ended.block(home);
        return result;
      };
      for (int step = 0; step < 4; ++step) {
        auto generator = at::detail::createCPUGenerator(step);
        const auto x = at::randn({4, 6}, generator).to(at::kCUDA);
        const auto h = net->trunk(x);
        const auto left = run_on(side, [&] { return net->left->forward(h).pow(2).mean(); });
        const auto right = run_on(another, [&] { return net->right->forward(h * 2).sin().mean(); });
        (left + right).backward();
        engine.step();
        engine.zero_grad();
      }
      for (const auto& p : net->parameters()) results[streams].push_back(p.detach().cpu());
    }
    for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[0][i].equal(results[1][i])) << i << slow;
  }
}

}  // namespace
}  // namespace plumb
#else
TEST(Cuda, IsNotInThisBuild) { GTEST_SKIP() << "this build has no CUDA"; }
#endif

// The engine on a real device: no host synchronisation in a step, and real streams that fill one bucket.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/plumb.h"
#include "scenarios/support/models.h"

#ifdef PLUMB_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
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

// Captured once, replayed often: the bits of steps that were run one by one.
TEST_F(Cuda, ACapturedStepIsReplayed) {
  constexpr int warm = 3, replays = 6;
  struct Case {
    Optimizer optimizer;
    bool streams;
  };
  for (const Strategy& row : strategies()) {
    for (const Case& one : {Case{AdamW{.lr = 0.01}, false}, Case{SGD{.lr = 0.1, .momentum = 0.9}, false},
                            Case{AdamW{.lr = 0.01}, true}}) {
      std::vector<at::Tensor> results[2];
      for (const bool captures : {false, true}) {
        torch::manual_seed(3);
        auto net = std::make_shared<scenarios::Net>();
        net->to(at::kCUDA);
        Engine engine(World(), *net, one.optimizer, {.strategy = row.name, .clip_norm = 0.5});
        const auto home = at::cuda::getStreamFromPool();
        const auto side = at::cuda::getStreamFromPool();
        c10::cuda::CUDAStreamGuard guard(home);
        at::Tensor x = at::zeros({4, 6}, at::kCUDA);
        auto step = [&] {
          const auto h = net->trunk(x);
          const auto left = net->left->forward(h).pow(2).mean();
          at::Tensor right;
          if (one.streams) {
            at::cuda::CUDAEvent begun, ended;
            begun.record(home);
            begun.block(side);
            {
              c10::cuda::CUDAStreamGuard on(side);
              right = net->right->forward(h * 2).sin().mean();
            }
            ended.record(side);
            ended.block(home);
          } else {
            right = net->right->forward(h * 2).sin().mean();
          }
          (left + right).backward();
          engine.step();
          engine.zero_grad();
        };
        at::cuda::CUDAGraph graph;
        for (int i = 0; i < warm + replays; ++i) {
          auto generator = at::detail::createCPUGenerator(i);
          const auto batch = at::randn({4, 6}, generator);
          if (captures && i == warm) {
            c10::cuda::device_synchronize();
            graph.capture_begin();
            step();
            graph.capture_end();
          }
          x.copy_(batch);
          if (captures && i >= warm) {
            graph.replay();
          } else {
            step();
          }
        }
        // And on without the graph.
        step();
        for (const auto& p : net->parameters()) results[captures].push_back(p.detach().cpu());
      }
      for (size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_TRUE(results[0][i].equal(results[1][i]))
            << row.name << ", parameter " << i << ", streams " << one.streams;
      }
    }
  }
}

TEST_F(Cuda, AFirstStepIsNotCaptured) {
  scenarios::Net net;
  net.to(at::kCUDA);
  Engine engine(World(), net, AdamW{.lr = 0.01});
  c10::cuda::CUDAStreamGuard guard(at::cuda::getStreamFromPool());
  const auto x = torch::randn({4, 6}, at::kCUDA);
  net.loss(x).backward();
  c10::cuda::device_synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  std::string said;
  try {
    engine.step();
  } catch (const Error& error) {
    said = error.what();
  }
  graph.capture_end();
  EXPECT_NE(said.find("run a step with the same gradients first"), std::string::npos) << said;
}

}  // namespace
}  // namespace plumb
#else
TEST(Cuda, IsNotInThisBuild) { GTEST_SKIP() << "this build has no CUDA"; }
#endif

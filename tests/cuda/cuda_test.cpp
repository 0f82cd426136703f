// The engine on a real device: no host synchronisation in a step, and real streams that fill one bucket.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "plumb/nn.h"
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

class CudaTokens : public Cuda {
 protected:
  static constexpr int64_t experts = 300, width = 64, rows = 500;  // more experts than one block has threads

  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped()) return;
    if (at::cuda::getCurrentDeviceProperties()->major != 9)
      GTEST_SKIP() << "no Hopper device: the host waits and checks";
    grouped->to(at::kCUDA, at::kBFloat16);
    x = at::randn({rows, width}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
  }

  // Random sizes that add up to `rows`.
  static at::Tensor sizes() { return at::bincount(at::randint(experts, {rows}), {}, experts); }
  at::Tensor forward(const at::Tensor& counts, bool ends) {
    const at::Tensor there = counts.pin_memory().to(at::kCUDA, /*non_blocking=*/true);
    return grouped->forward(x, ends ? nn::Tokens::ends(there) : nn::Tokens::sizes(there));
  }
  static std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  nn::GroupedLinear grouped{nn::GroupedLinearOptions{.experts = experts, .in = width, .out = width}};
  at::Tensor x;
};

TEST_F(CudaTokens, AreNeverWaitedFor) {
  for (const auto sums : {at::kFloat, at::kBFloat16}) {
    Options options;
    options.accumulate_dtype = sums;
    Engine engine(World(), *grouped, AdamW{.lr = 0.01}, options);
    for (int step = 0; step < 6; ++step) {
      const at::Tensor counts = sizes();
      const at::Tensor given = step % 2 ? counts.cumsum(0) : counts;
      const at::Tensor pinned = given.pin_memory();
      std::optional<NoSynchronisation> strict;
      if (step >= 3) strict.emplace();
      const at::Tensor there = pinned.to(at::kCUDA, /*non_blocking=*/true);
      for (int micro = 0; micro < 2; ++micro) {
        grouped->forward(x, step % 2 ? nn::Tokens::ends(there) : nn::Tokens::sizes(there)).sum().backward();
      }
      engine.step();
      strict.reset();
      // The same as counts that the host sees.
      const at::Tensor seen = grouped->forward(x, nn::Tokens::sizes(counts));
      EXPECT_TRUE(forward(given, step % 2).equal(seen)) << "step " << step;
      const at::Tensor gradient = grouped->weights[0].grad().to(at::kDouble);
      const at::Tensor sizes_there = counts.to(at::kCUDA);
      const at::Tensor group = at::repeat_interleave(sizes_there);
      const at::Tensor wanted = at::zeros({experts, width}, gradient.options()).index_add_(0, group, x.to(at::kDouble));
      const at::Tensor off = (gradient - 2 * wanted.unsqueeze(1)).abs().max();
      EXPECT_LT(off.item<double>(), sums == at::kFloat ? 1e-4 : 0.2) << "step " << step << ", sums of " << sums;
      engine.zero_grad();
    }
  }
}

TEST_F(CudaTokens, ThatCannotBeAreAnErrorOfTheNextCall) {
  Engine engine(World(), *grouped, AdamW{.lr = 0.01});
  const at::Tensor good = sizes();
  struct Case {
    at::Tensor counts;
    bool ends;
    std::string said;
  };
  std::vector<Case> cases;
  const auto changed = [&](const at::Tensor& from, int64_t expert, int64_t by) {
    at::Tensor to = from.clone();
    to[expert] += by;
    return to;
  };
  cases.push_back({changed(good, 7, 3), false, "add up to 503; expected 500"});
  cases.push_back({changed(good, 299, -good[299].item<int64_t>() - 2), false, "expert 299 is given -2 tokens"});
  cases.push_back({at::full({experts}, INT64_MAX), false, "expert 0 is given 9223372036854775807 tokens"});
  cases.push_back({changed(good.cumsum(0), 299, 1), true, "add up to 501; expected 500"});
  cases.push_back({changed(good.cumsum(0), 280, -500), true, "expert 280 is given"});
  cases.push_back({at::zeros({experts}, at::kInt), true, "add up to 0; expected 500"});
  std::vector<at::Tensor> before;
  for (const auto& p : grouped->parameters()) before.push_back(p.detach().clone());
  for (const Case& c : cases) {
    for (const int who : {0, 1, 2}) {
      const at::Tensor y = forward(c.counts, c.ends);
      c10::cuda::device_synchronize();
      EXPECT_TRUE(y.isfinite().all().item<bool>()) << "rows that nothing wrote";
      const std::string said = error_of([&] {
        if (who == 0) y.sum().backward();
        if (who == 1) forward(good, false);
        if (who == 2) engine.step();
      });
      EXPECT_NE(said.find(c.said), std::string::npos) << who << ": " << said;
      EXPECT_NE(said.find("zero_grad()"), std::string::npos) << said;
      engine.zero_grad();
      EXPECT_EQ(error_of([&] { forward(good, false); }), "") << "an error is told once";
    }
  }
  c10::cuda::device_synchronize();
  size_t i = 0;
  for (const auto& p : grouped->parameters()) EXPECT_TRUE(p.equal(before[i++])) << "a step was made of wrong counts";
  forward(good, false).sum().backward();
  EXPECT_EQ(error_of([&] { engine.step(); }), "");
}

}  // namespace
}  // namespace plumb
#else
TEST(Cuda, IsNotInThisBuild) { GTEST_SKIP() << "this build has no CUDA"; }
#endif

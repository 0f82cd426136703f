// The engine on a real device: no host synchronisation in a step, and real streams that fill one bucket.
#include <gtest/gtest.h>
#include "libtorch.h"

#include <functional>
#include <string>
#include <vector>

#include "lane/lane.h"
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

constexpr int64_t kLong = 50'000'000;  // cycles, some 25 ms: whoever does not wait for them reads too early

// Passes its input on. Its backward takes long, on the stream that its forward ran on.
struct Slow : torch::autograd::Function<Slow> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    at::cuda::sleep(kLong);
    return {gradients[0]};
  }
};

struct TwoWeights : torch::nn::Module {
  TwoWeights() {
    delivered = register_parameter("delivered", at::zeros({64, 64}));
    fused = register_module("fused", nn::Linear(nn::LinearOptions{.in = 64, .out = 64, .bias = false}));
  }
  at::Tensor delivered;
  nn::Linear fused{nullptr};
};

// T1: gradients that are written on streams of their own, slowly. Plain gradients would show nothing here: they accumulate
// where the backward was called, and autograd orders that. What is delivered, or written by a fused node whose input needs
// no gradient, is ordered by nobody but the lanes. Of the two that write one gradient, the slow one comes first.
TEST_F(Cuda, StreamsThatFillOneBucketAreAllWaitedFor) {
  for (const Strategy& row : strategies()) {
    std::vector<at::Tensor> results[2];
    for (const bool streams : {false, true}) {
      torch::manual_seed(2);
      TwoWeights net;
      net.to(at::kCUDA);
      Engine engine(World(), net, SGD{.lr = 0.1, .momentum = 0.9}, {.strategy = row.name});
      const auto home = at::cuda::getCurrentCUDAStream();
      const auto side = at::cuda::getStreamFromPool();
      const auto another = at::cuda::getStreamFromPool();
      const auto wait = [](const at::cuda::CUDAStream& waiter, const at::cuda::CUDAStream& on) {
        at::cuda::CUDAEvent event;
        event.record(on);
        event.block(waiter);
      };
      const auto under = [&](const at::cuda::CUDAStream& stream, const std::function<void()>& body) {
        if (!streams) return body();
        wait(stream, home);
        const c10::cuda::CUDAStreamGuard guard(stream);
        body();
      };
      std::vector<at::Tensor> inputs;  // alive until everything has run
      for (int step = 0; step < 3; ++step) {
        auto generator = at::detail::createCPUGenerator(step);
        const at::Tensor x = inputs.emplace_back(at::randn({8, 64}, generator).to(at::kCUDA));
        const at::Tensor raw = inputs.emplace_back(at::randn({64, 64}, generator).to(at::kCUDA));
        under(side, [&] {
          at::cuda::sleep(kLong);
          engine.deliver(net.delivered, inputs.emplace_back(raw * 2));
        });
        under(another, [&] { engine.deliver(net.delivered, inputs.emplace_back(raw * 3)); });
        engine.end_pass();
        at::Tensor quick, slow;
        under(another, [&] { quick = net.fused(x * 2).sin().sum(); });
        under(side, [&] { slow = Slow::apply(net.fused(x)).pow(2).sum(); });  // made last: its backward comes first
        if (streams) wait(home, side);
        if (streams) wait(home, another);
        inputs.push_back(quick);
        inputs.push_back(slow);
        (quick + slow).backward();
        engine.step();
        engine.zero_grad();
      }
      for (const auto& p : net.parameters()) results[streams].push_back(p.detach().cpu());
      c10::cuda::device_synchronize();
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(at::allclose(results[0][i], results[1][i], 1e-5, 1e-6)) << row.name << ", parameter " << i;
    }
  }
}

// A sparse gradient is two tensors, and both are kept.
TEST_F(Cuda, SparseTensorsAreKeptForTheStreamThatReadsThem) {
  const auto side = at::cuda::getStreamFromPool();
  constexpr int64_t count = 3 << 20;
  for (const bool kept : {false, true}) {
    c10::cuda::device_synchronize();
    const void *indices = nullptr, *values = nullptr;
    {
      const at::Tensor sparse =
          at::sparse_coo_tensor(at::arange(count, at::kCUDA).view({1, count}), at::ones({count}, at::kCUDA), {count});
      indices = sparse._indices().const_data_ptr();
      values = sparse._values().const_data_ptr();
      const c10::cuda::CUDAStreamGuard guard(side);
      at::cuda::sleep(kLong);
      if (kept) keep_for_current(sparse);
    }
    // Freed, and handed out again at once unless the other stream still needs it.
    const at::Tensor first = at::empty({count}, at::TensorOptions(at::kCUDA).dtype(at::kLong));
    const at::Tensor second = at::empty({count}, at::kCUDA);
    EXPECT_EQ(first.const_data_ptr() == indices, !kept);
    EXPECT_EQ(second.const_data_ptr() == values, !kept);
    c10::cuda::device_synchronize();
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

// Forward and backward alone are captured; step() is not. As in plain PyTorch, gradients stay between replays.
TEST_F(Cuda, ACapturedBackwardIsReplayedBetweenSteps) {
  constexpr int warm = 3, replays = 5;
  for (const Strategy& row : strategies()) {
    std::vector<at::Tensor> results[2];
    for (const bool captures : {false, true}) {
      torch::manual_seed(4);
      scenarios::Net net;
      net.to(at::kCUDA);
      Engine engine(World(), net, AdamW{.lr = 0.01}, {.strategy = row.name, .clip_norm = 0.5});
      c10::cuda::CUDAStreamGuard guard(at::cuda::getStreamFromPool());
      const at::Tensor x = at::zeros({4, 6}, at::kCUDA);
      at::cuda::CUDAGraph graph;
      for (int i = 0; i < warm + replays; ++i) {
        if (captures && i == warm) {
          engine.zero_grad();
          c10::cuda::device_synchronize();
          graph.capture_begin();
          net.loss(x).backward();
          graph.capture_end();
        }
        x.copy_(at::randn({4, 6}, at::detail::createCPUGenerator(i)));
        if (captures && i >= warm) {
          graph.replay();
        } else {
          engine.zero_grad();
          net.loss(x).backward();
        }
        engine.step();
      }
      for (const auto& p : net.parameters()) results[captures].push_back(p.detach().cpu());
      if (!captures) continue;
      engine.zero_grad();
      graph.replay();
      std::string said;
      try {
        engine.step();
      } catch (const Error& error) {
        said = error.what();
      }
      EXPECT_NE(said.find("do not call zero_grad()"), std::string::npos) << said;
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[0][i].equal(results[1][i])) << row.name << ", parameter " << i;
    }
  }
}

TEST_F(Cuda, AFirstBackwardIsNotCaptured) {
  scenarios::Net net;
  net.to(at::kCUDA);
  // Leaves accumulate where the engine was built: elsewhere, CUDA itself refuses the capture.
  c10::cuda::CUDAStreamGuard guard(at::cuda::getStreamFromPool());
  Engine engine(World(), net, AdamW{.lr = 0.01});
  const auto x = torch::randn({4, 6}, at::kCUDA);
  // No pass, and the libraries have what they allocate for this stream before the capture.
  torch::autograd::grad({net.loss(x)}, net.parameters(), {}, {}, /*create_graph=*/false, /*allow_unused=*/true);
  c10::cuda::device_synchronize();
  // By hand: libtorch's own graph would not forget a capture that came to nothing.
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  std::string said;
  try {
    net.loss(x).backward();
  } catch (const std::exception& error) {
    said = error.what();
  }
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  EXPECT_NE(said.find("captured into a graph before the first step"), std::string::npos) << said;
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
    for (const at::Tensor& weight : grouped->weights) weight.set_grad_dtype(sums);  // or each would be rounded first
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

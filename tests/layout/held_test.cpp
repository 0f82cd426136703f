// What an engine really holds after a step, counted in libtorch's allocator, beside the estimate.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "layout/estimate.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

// libtorch's own allocator, with a sum of what was asked for.
class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::alloc_cpu(bytes);
    const std::lock_guard lock(mutex());
    if (memory != nullptr) living() += static_cast<int64_t>(sizes()[memory] = bytes);
    return {memory, memory, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static int64_t& living() {
    static int64_t bytes = 0;
    return bytes;
  }
  static std::mutex& mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }

 private:
  static std::unordered_map<void*, size_t>& sizes() {
    static auto* const sizes = new std::unordered_map<void*, size_t>;
    return *sizes;
  }
  static void give_back(void* memory) {
    if (memory == nullptr) return;
    {
      const std::lock_guard lock(mutex());
      const auto it = sizes().find(memory);
      living() -= static_cast<int64_t>(it->second);
      sizes().erase(it);
    }
    c10::free_cpu(memory);
  }
};

int64_t living_bytes() {
  const std::lock_guard lock(Counting::mutex());
  return Counting::living();
}

// Nothing is padded on up to 4 ranks, and every bucket is too large to be kept as a spare.
constexpr int64_t kRows = 768, kColumns = 512, kWeight = kRows * kColumns;

struct WeightImpl : torch::nn::Module {
  WeightImpl() { weight = register_parameter("weight", torch::full({kRows, kColumns}, 0.01)); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Weight);

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 2; ++i) units.push_back(register_module("unit" + std::to_string(i), Weight()));
    other = register_module("other", Weight());
  }
  at::Tensor loss(const at::Tensor& x) {
    at::Tensor sum = other(x).sum();
    for (auto& unit : units) sum = sum + unit->forward(x).sum();
    return sum;
  }
  std::vector<Unit<Weight>> units;
  Weight other{nullptr};
};

struct Case {
  std::string name;
  at::ScalarType dtype;
  Optimizer optimizer;
  Recipe recipe;
  bool masters = true;
};

class Held : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static void SetUpTestSuite() { c10::SetCPUAllocator(new Counting, /*priority=*/1); }
};

TEST_P(Held, IsWhatTheEstimateSays) {
  const auto& [name, ranks] = GetParam();
  const std::vector<Case> cases = {
      {"f32 AdamW", at::kFloat, AdamW{.lr = 1e-3}, kFloat32},
      {"f32 SGD with momentum", at::kFloat, SGD{.lr = 0.1, .momentum = 0.9}, {4, 4, 4}},
      {"f32 SGD", at::kFloat, SGD{.lr = 0.1}, {4, 4, 0}},
      {"f64 AdamW", at::kDouble, AdamW{.lr = 1e-3}, {8, 8, 16}},
      {"bf16 AdamW", at::kBFloat16, AdamW{.lr = 1e-3}, kHalf},
      {"bf16 SGD with momentum, no masters", at::kBFloat16, SGD{.lr = 0.1, .momentum = 0.9}, {2, 4, 4}, false},
  };
  for (const Case& c : cases) {
    ModelShape shape{{kWeight, kWeight}, kWeight, kWeight};
    Plan plan;
    plan.row = strategy(name);
    plan.mesh = mesh_of(plan.row, {}, ranks);
    plan.recipe = c.recipe;
    const int64_t before = living_bytes();
    std::atomic<int64_t> held = 0;
    run_local(ranks, [&](World world) {
      Model model;
      model.to(c.dtype);
      Options options;
      options.strategy = name;
      options.master_weights = c.masters;
      if (c.dtype == at::kBFloat16) options.accumulate_dtype = at::kFloat;
      Engine engine(world, model, c.optimizer, options);
      for (int step = 0; step < 2; ++step) {
        if (step > 0) engine.zero_grad();
        model.loss(at::ones({1, kColumns}, c.dtype)).backward();
        engine.step();
      }
      world.barrier();
      if (world.rank() == 0) held = living_bytes() - before;
      world.barrier();
    });
    // Counts, messages and the like are small; a rank's share of the smallest thing is 192 KiB.
    EXPECT_NEAR(static_cast<double>(held) / ranks, static_cast<double>(estimate(shape, plan).held()), 64 << 10)
        << c.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, Held, testing::Combine(testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"), testing::Range(1, 5)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)); });

}  // namespace
}  // namespace plumb

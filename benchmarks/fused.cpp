// The backward of a mixture-of-experts block, fused and unfused in one run: milliseconds, and the peak of memory where
// the device's allocator counts it. On a GPU when there is one: build/bin/bench_fused
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "plumb/nn.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Sizes {
  int64_t tokens, width, hidden, experts, top_k;
};

void settle(at::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize();
}

// The owner of an f32 buffer that is overwritten by the first contribution and added to by the others.
class Owner : public plumb::FusedSink {
 public:
  explicit Owner(at::Tensor buffer) : buffer_(std::move(buffer)) {}
  plumb::GradTarget open() override { return {buffer_, added_}; }
  void wrote() override { added_ = true; }
  void begin_step() { added_ = false; }

 private:
  at::Tensor buffer_;
  bool added_ = false;
};

void measure(const char* name, const Sizes& sizes, at::Device device, bool fused,
             plumb::nn::Experts kind = plumb::nn::Experts::grouped) {
  const at::ScalarType dtype = device.is_cuda() ? at::kBFloat16 : at::kFloat;
  plumb::nn::MoE moe(plumb::nn::MoEOptions{
      .width = sizes.width, .hidden = sizes.hidden, .experts = sizes.experts, .top_k = sizes.top_k, .weights = kind});
  moe->to(device, dtype);
  std::vector<at::Tensor> sums;
  std::vector<std::shared_ptr<Owner>> owners;
  std::vector<at::Tensor> weights = moe->experts->up;
  weights.insert(weights.end(), moe->experts->down.begin(), moe->experts->down.end());
  for (const at::Tensor& weight : weights) {
    sums.push_back(at::zeros(weight.sizes(), weight.options().dtype(at::kFloat).requires_grad(false)));
    owners.push_back(std::make_shared<Owner>(sums.back()));
    if (fused) plumb::attach(weight, owners.back());
  }
  const at::Tensor x = at::randn({sizes.tokens, sizes.width}).to(device, dtype).requires_grad_();
  const at::Tensor dy = at::randn({sizes.tokens, sizes.width}).to(device, dtype);
  constexpr int micro_batches = 2, steps = 12;
  std::vector<double> ms;
  double peak = 0;
  for (int step = 0; step < steps; ++step) {
    double sum = 0;
    for (int micro = 0; micro < micro_batches; ++micro) {
      at::Tensor y = moe->forward(x);
      settle(device);
      int64_t held = 0;
      if (device.is_cuda()) {
        auto* allocator = at::getDeviceAllocator(device.type());
        allocator->resetPeakStats(device.index());
        held = allocator->getDeviceStats(device.index()).allocated_bytes[0].current;
      }
      const auto start = Clock::now();
      y.backward(dy);
      if (!fused) {
        at::NoGradGuard no_grad;
        for (size_t i = 0; i < weights.size(); ++i) {
          micro == 0 ? sums[i].copy_(weights[i].grad()) : sums[i].add_(weights[i].grad());
          weights[i].mutable_grad().reset();
        }
      }
      settle(device);
      sum += std::chrono::duration<double>(Clock::now() - start).count() * 1e3;
      if (device.is_cuda()) {
        const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
        peak = std::max(peak, static_cast<double>(stats.allocated_bytes[0].peak - held) / (1 << 20));
      }
    }
    for (auto& owner : owners) owner->begin_step();
    ms.push_back(sum / micro_batches);
  }
  std::sort(ms.begin(), ms.end());
  std::printf("  %-28s %9.3f ms per backward", name, ms[ms.size() / 2]);
  if (device.is_cuda()) std::printf(", %8.0f MiB above what the forward left", peak);
  std::printf("\n");
}

// What it costs to be told by a stand-in: few rows, so that the product does not hide it.
void measure_told(at::Device device, bool told) {
  constexpr int64_t width = 4096;
  plumb::nn::Linear linear(plumb::nn::LinearOptions{.in = width, .out = width, .bias = false});
  linear->to(device);
  plumb::MainGrad facts{.main_grad = at::zeros({width, width}, at::TensorOptions(device))};
  if (told) facts.grad_added_to_main_grad = false;
  const auto sink = plumb::attach_main_grad(linear->weight, facts);
  const at::Tensor x = at::randn({8, width}, at::TensorOptions(device)), dy = at::randn_like(x);
  std::vector<double> ms;
  for (int micro = 0; micro < 30; ++micro) {
    const at::Tensor y = linear->forward(x);
    settle(device);
    const auto start = Clock::now();
    y.backward(dy);
    settle(device);
    ms.push_back(std::chrono::duration<double>(Clock::now() - start).count() * 1e3);
  }
  std::sort(ms.begin(), ms.end());
  const at::Tensor grad = linear->weight.grad();
  std::printf("  %-28s %9.3f ms per backward, %zu MiB in .grad\n", told ? "told by a stand-in" : "told nothing",
              ms[ms.size() / 2], grad.defined() ? grad.nbytes() >> 20 : 0);
}

}  // namespace

int main() {
  const bool gpu = torch::cuda::is_available();
  const at::Device device = gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  const std::vector<Sizes> all = gpu ? std::vector<Sizes>{{8192, 2048, 1408, 64, 2}, {8192, 4096, 7168, 8, 2}}
                                     : std::vector<Sizes>{{1024, 256, 256, 8, 2}};
  for (const Sizes& s : all) {
    std::printf("%ld tokens to %ld of %ld experts, width %ld, hidden %ld, %s\n", s.tokens, s.top_k, s.experts, s.width,
                s.hidden, gpu ? "bf16 with f32 sums" : "f32");
    measure("unfused, then added", s, device, false);
    measure("fused", s, device, true);
    measure("fused, a weight per expert", s, device, true, plumb::nn::Experts::separate);
  }
  std::printf("8 rows through a linear layer of 4096 x 4096, f32\n");
  for (const bool told : {false, true}) measure_told(device, told);
}

// Set-up of the simulator for all its tests, and the models they train.
#include "sim/support/support.h"

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>

namespace plumb::sim {
namespace {

struct Accelerator final : testing::Environment {
  void SetUp() override {
    at::set_num_threads(1);
    init(4);
  }
};
const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

struct Attention : torch::nn::Module {
  Attention() {
    embedding = register_module("embedding", torch::nn::Embedding(32, 16));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    qkv = register_module("qkv", torch::nn::Linear(16, 48));
    out = register_module("out", torch::nn::Linear(16, 16));
    drop = register_module("drop", torch::nn::Dropout(0.2));
    head = register_module("head", torch::nn::Linear(16, 8));
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto batch = ids.size(0), length = ids.size(1);
    auto x = embedding(ids);
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto heads = [&](const at::Tensor& t) { return t.view({batch, length, 2, 8}).transpose(1, 2); };
    auto scores = heads(parts[0]).matmul(heads(parts[1]).transpose(-2, -1)) / std::sqrt(8.0);
    const auto hidden = torch::ones({length, length}, ids.options().dtype(at::kBool)).tril().logical_not();
    scores = scores.masked_fill(hidden, -1e9).softmax(-1);
    const auto mixed = scores.matmul(heads(parts[2])).transpose(1, 2).reshape({batch, length, 16});
    return head(drop(x + out(mixed)));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, head{nullptr};
  torch::nn::Dropout drop{nullptr};
};

at::Tensor run_sequential(torch::nn::Module& module, const at::Tensor& x) {
  return dynamic_cast<torch::nn::SequentialImpl&>(module).forward(x);
}

}  // namespace

const std::vector<ModelCase>& models() {
  static const std::vector<ModelCase> all = {
      {"mlp",
       [] {
         return torch::nn::Sequential(torch::nn::Linear(12, 32), torch::nn::GELU(), torch::nn::Linear(32, 32),
                                      torch::nn::ReLU(), torch::nn::Linear(32, 6))
             .ptr();
       },
       run_sequential, [] { return torch::randn({16, 12}); }},
      {"convolution",
       [] {
         return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)),
                                      torch::nn::BatchNorm2d(8), torch::nn::SiLU(), torch::nn::MaxPool2d(2),
                                      torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 4, 3).stride(2)),
                                      torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)), torch::nn::Flatten(),
                                      torch::nn::Linear(4, 5))
             .ptr();
       },
       run_sequential, [] { return torch::randn({4, 3, 8, 8}); }},
      {"attention, embedding, layer norm, dropout", [] { return std::make_shared<Attention>(); },
       [](torch::nn::Module& module, const at::Tensor& x) { return dynamic_cast<Attention&>(module).forward(x); },
       [] { return torch::randint(0, 32, {2, 10}); }},
      {"dropout and layer norm",
       [] {
         return torch::nn::Sequential(torch::nn::Linear(8, 24), torch::nn::LayerNorm(torch::nn::LayerNormOptions({24})),
                                      torch::nn::Dropout(0.5), torch::nn::Tanh(), torch::nn::Linear(24, 3))
             .ptr();
       },
       run_sequential, [] { return torch::randn({10, 8}); }},
  };
  return all;
}

std::vector<at::Tensor> train(const ModelCase& model, const at::Device& device, int steps,
                              const std::string& optimizer) {
  torch::manual_seed(1);
  auto module = model.make();
  module->to(device);
  std::unique_ptr<torch::optim::Optimizer> update;
  if (optimizer == "sgd") {
    update = std::make_unique<torch::optim::SGD>(module->parameters(),
                                                 torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));
  } else {
    update = std::make_unique<torch::optim::AdamW>(module->parameters(), torch::optim::AdamWOptions(1e-3));
  }
  std::vector<at::Tensor> results;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor x = model.input().to(device);
    update->zero_grad();
    const at::Tensor y = model.forward(*module, x);
    const at::Tensor loss = y.size(-1) == 8 ? torch::cross_entropy_loss(y.view({-1, 8}), x.view({-1}).remainder(8))
                                            : torch::mse_loss(y, torch::ones_like(y));
    loss.backward();
    torch::nn::utils::clip_grad_norm_(module->parameters(), 1.0);
    update->step();
    results.push_back(loss.detach());
  }
  for (const auto& parameter : module->parameters()) results.push_back(parameter.detach());
  for (const auto& buffer : module->buffers()) results.push_back(buffer.detach());
  for (auto& result : results) result = result.cpu();
  return results;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

testing::AssertionResult reports(const std::vector<Race>& races, const std::string& one, const std::string& other) {
  std::string seen;
  for (const Race& race : races) {
    const auto has = [](const Site& site, const std::string& word) {
      return (site.operation + " | " + site.scope).find(word) != std::string::npos;
    };
    if ((has(race.first, one) && has(race.second, other)) || (has(race.first, other) && has(race.second, one))) {
      return testing::AssertionSuccess();
    }
    seen.append("\n").append(race.text());
  }
  return testing::AssertionFailure() << "no race between '" << one << "' and '" << other
                                     << "'; reported: " << (seen.empty() ? "nothing" : seen);
}

}  // namespace plumb::sim

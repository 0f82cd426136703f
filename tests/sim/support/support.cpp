// Set-up of the simulator for all its tests, and the models they train.
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

struct Accelerator final : testing::Environment {
  void SetUp() override {
    at::set_num_threads(1);
    init(4);
  }
};
const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

namespace nn = torch::nn;

struct Attention : nn::Module {
  Attention() {
    embedding = register_module("embedding", nn::Embedding(32, 16));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})));
    qkv = register_module("qkv", nn::Linear(16, 48));
    out = register_module("out", nn::Linear(16, 16));
    drop = register_module("drop", nn::Dropout(0.2));
    head = register_module("head", nn::Linear(16, 8));
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
  nn::Embedding embedding{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, head{nullptr};
  nn::Dropout drop{nullptr};
};

at::Tensor run_sequential(nn::Module& module, const at::Tensor& x) {
  return dynamic_cast<nn::SequentialImpl&>(module).forward(x);
}

}  // namespace

const std::vector<ModelCase>& models() {
  static const std::vector<ModelCase> all = {
      {"mlp",
       [] {
         return nn::Sequential(nn::Linear(12, 32), nn::GELU(), nn::Linear(32, 32), nn::ReLU(), nn::Linear(32, 6)).ptr();
       },
       run_sequential, [] { return torch::randn({16, 12}); }},
      {"convolution",
       [] {
         return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::SiLU(),
                               nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(8, 4, 3).stride(2)),
                               nn::GroupNorm(nn::GroupNormOptions(2, 4)), nn::Flatten(), nn::Linear(4, 5))
             .ptr();
       },
       run_sequential, [] { return torch::randn({4, 3, 8, 8}); }},
      {"attention, embedding, layer norm, dropout", [] { return std::make_shared<Attention>(); },
       [](nn::Module& module, const at::Tensor& x) { return dynamic_cast<Attention&>(module).forward(x); },
       [] { return torch::randint(0, 32, {2, 10}); }},
      {"dropout and layer norm",
       [] {
         return nn::Sequential(nn::Linear(8, 24), nn::LayerNorm(nn::LayerNormOptions({24})), nn::Dropout(0.5),
                               nn::Tanh(), nn::Linear(24, 3))
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

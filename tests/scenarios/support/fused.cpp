// Fused operations: rows F1 to F4, with the engine's bucket as the buffer.
#include "plumb/nn.h"
#include "scenarios/support/corpus.h"
#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

// A linear layer, experts of each form, and a plain layer between them that autograd alone serves.
struct Mixture : torch::nn::Module {
  explicit Mixture(bool delayed) {
    front = register_module(
        "front", nn::Linear(nn::LinearOptions{.in = 6, .out = 8, .bias = true, .delay_wgrad_compute = delayed}));
    grouped = register_module(
        "grouped",
        nn::GroupedLinear(nn::GroupedLinearOptions{
            .experts = 3, .in = 8, .out = 8, .weights = nn::Experts::grouped, .delay_wgrad_compute = delayed}));
    separate = register_module(
        "separate",
        nn::GroupedLinear(nn::GroupedLinearOptions{
            .experts = 3, .in = 8, .out = 8, .weights = nn::Experts::separate, .delay_wgrad_compute = delayed}));
    mlp = register_module("mlp", nn::GroupedMLP(nn::GroupedMLPOptions{.experts = 3,
                                                                      .width = 8,
                                                                      .hidden = 5,
                                                                      .activation = nn::Activation::swiglu,
                                                                      .weights = nn::Experts::separate,
                                                                      .delay_wgrad_compute = delayed}));
    plain = register_module("plain", torch::nn::Linear(8, 3));
  }
  at::Tensor body(const at::Tensor& h, const nn::Tokens& tokens) {
    const at::Tensor y = h + separate->forward(torch::tanh(grouped->forward(h, tokens)), tokens);
    return y + mlp->forward(y, tokens);
  }
  at::Tensor loss(const at::Tensor& x, const std::vector<int64_t>& counts) {
    const auto tokens = nn::Tokens::sizes(torch::tensor(counts, at::kLong));
    return plain->forward(body(torch::tanh(front->forward(x)), tokens)).pow(2).sum() * 0.05;
  }
  void flush() {
    front->backward_dw();
    grouped->backward_dw();
    separate->backward_dw();
    mlp->backward_dw();
  }
  Unit<nn::Linear> front{nullptr};
  Unit<nn::GroupedLinear> grouped{nullptr}, separate{nullptr};
  Unit<nn::GroupedMLP> mlp{nullptr};
  Unit<torch::nn::Linear> plain{nullptr};
};

using Counts = std::vector<int64_t>;

Scenario mixture(const char* id, const char* name, Program program, bool delayed = false) {
  Scenario scenario{id, name, [delayed] { return std::make_shared<Mixture>(delayed); }, std::move(program)};
  scenario.options.bucket_bytes = 600;
  scenario.options.first_bucket_bytes = 200;
  scenario.optimizer = SGD{.lr = 0.02, .momentum = 0.9};
  scenario.tolerance = 5e-5;
  return scenario;
}

at::Tensor loss_of(Stage& stage, int micro, const Counts& counts) {
  int64_t rows = 0;
  for (int64_t count : counts) rows += count;
  return stage.share(stage.as<Mixture>().loss(stage.input({rows, 6}, micro), counts));
}

}  // namespace

std::vector<Scenario> fused_scenarios() {
  std::vector<Scenario> all;
  all.push_back(mixture("F1", "FusedModulesWriteTheirBuckets", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      loss_of(stage, step, {3, 2, 4}).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(mixture("F1", "FusedModulesWithoutZeroGrad", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      loss_of(stage, step, {1, 2, 17}).backward();
      stage.step();
    }
  }));
  all.push_back(mixture("F2", "ExpertsWithoutTokensAndARankWithoutAny", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      const Counts counts = stage.rank == step % stage.size ? Counts{0, 0, 0}
                            : step == 1                     ? Counts{0, 5, 0}
                                                            : Counts{2, 0, 1};
      loss_of(stage, step, counts).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(mixture("F3", "MicroBatchesIntoTheSameBuckets", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 4; ++micro) {
        std::unique_ptr<NoSync> guard;
        if (micro < 3 && step != 1) guard = stage.no_sync();
        loss_of(stage, 10 * step + micro, {3, micro, 2}).backward();
      }
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(all.back());
  all.back().name = "MicroBatchesHeldWhole";
  all.back().options.hold_unsharded = true;
  all.push_back(mixture(
      "F3", "DelayedWeightGradientsFlushedLater",
      [](Stage& stage) {
        for (int step = 0; step < 3; ++step) {
          for (int micro = 0; micro < 3; ++micro) {
            loss_of(stage, 10 * step + micro, {3, 2, micro}).backward();
            if (micro != 1) stage.as<Mixture>().flush();
          }
          stage.step();
          stage.zero_grad();
        }
      },
      true));
  all.push_back(mixture("F4", "RecomputedFusedModules", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      auto& model = stage.as<Mixture>();
      const auto tokens = nn::Tokens::sizes(torch::tensor({4, 0, 3}, at::kLong));
      const Checkpoint::Body body = [&](const at::Tensor& h) { return model.body(h, tokens); };
      const auto h = torch::tanh(model.front->forward(stage.input({7, 6}, step)));
      const auto y = checkpoint(body, checkpoint(body, h));
      stage.share(model.plain->forward(y).pow(2).sum() * 0.01).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(mixture("F1", "RetainedGraphsGradAndDoubleBackwardOfFusedModules", [](Stage& stage) {
    for (int step = 0; step < 2; ++step) {
      auto loss = loss_of(stage, step, {3, 2, 4});
      loss.backward({}, true);
      torch::autograd::grad({loss}, {stage.as<Mixture>().front->weight}, {}, true);
      loss.backward();
      auto x = stage.input({4, 6}, 50 + step).requires_grad_();
      auto again = stage.as<Mixture>().loss(x, {1, 2, 1});
      auto gradient = torch::autograd::grad({again}, {x}, {}, true, true)[0];
      stage.share(again + gradient.pow(2).sum() * 0.1).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(mixture("F1", "FusedAndPlainUsesOfOneWeight", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      const auto x = stage.input({4, 6}, step);
      auto& model = stage.as<Mixture>();
      const auto fused = model.front->forward(x);
      const auto plain = torch::linear(x * 2, model.front->weight);
      stage.share((fused * plain).sum() * 0.1).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  return all;
}

}  // namespace plumb::scenarios

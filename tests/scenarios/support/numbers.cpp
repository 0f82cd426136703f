// Numbers: rows N1 to N3, N5, N6.
#include "scenarios/support/corpus.h"
#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

// A kernel that yields an f32 gradient for whatever dtype its weight has.
struct Raw : torch::autograd::Function<Raw> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x});
    return (x * weight.to(at::kFloat)).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {at::Tensor(), gradients[0] * context->get_saved_variables()[0]};
  }
};

struct HalfPart : torch::nn::Module {
  explicit HalfPart(const std::function<void(at::Tensor&)>& rule) {
    weight = register_parameter("weight", torch::randn({5, 3}).to(at::kBFloat16));
    other = register_parameter("other", torch::randn({4}));
    rule(weight);
  }
  at::Tensor loss(const at::Tensor& x) { return Raw::apply(x, weight) + (other * x.sum()).sin().sum(); }
  at::Tensor weight, other;
};

struct HalfWeight : torch::nn::Module {
  explicit HalfWeight(const std::function<void(at::Tensor&)>& rule) {
    part = register_module("part", std::make_shared<HalfPart>(rule));
  }
  at::Tensor loss(const at::Tensor& x) { return part->loss(x); }
  Unit<HalfPart> part{nullptr};
};

Program train_half(int backwards) {
  return [=](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < backwards; ++micro) {
        stage.share(stage.as<HalfWeight>().loss(stage.input({5, 3}, 100 * step + micro))).backward();
      }
      stage.all([&] {
        const auto weight = stage.as<HalfWeight>().part->weight;
        const auto rule = weight.grad_dtype();
        if (rule && weight.grad().scalar_type() != *rule)
          throw std::logic_error("the gradient has another dtype than its rule");
      });
      stage.step();
      stage.zero_grad();
    }
  };
}

}  // namespace

std::vector<Scenario> number_scenarios() {
  std::vector<Scenario> all;
  auto half = [&](const char* name, std::function<void(at::Tensor&)> rule, int backwards, double tolerance) {
    Scenario scenario{"N1", name, [rule] { return std::make_shared<HalfWeight>(rule); }, train_half(backwards)};
    scenario.optimizer = SGD{.lr = 0.05};
    scenario.options.master_weights = false;
    scenario.tolerance = tolerance;
    all.push_back(scenario);
  };
  Scenario wide{"N1", "F64GradientsKeepTheirDigits",
                [] {
                  auto net = std::make_shared<Net>();
                  net->to(at::kDouble);
                  return net;
                },
                [](Stage& stage) {
                  for (int step = 0; step < 2; ++step) {
                    stage.share(stage.as<Net>().loss(stage.input({4, 6}, step).to(at::kDouble))).backward();
                    stage.step();
                    stage.zero_grad();
                  }
                }};
  wide.tolerance = 1e-12;
  all.push_back(wide);
  wide.name = "F64GradientsAreClippedInF64";
  wide.options.clip_norm = 0.01;
  all.push_back(std::move(wide));
  // bf16 keeps 8 bits: sums of ranks in another order differ by a unit in the last place of a parameter.
  half("AnF32GradientOfABf16ParameterRuleUnset", [](at::Tensor&) {}, 1, 2e-2);
  half("AnF32GradientOfABf16ParameterRuleF32", [](at::Tensor& weight) { weight.set_grad_dtype(at::kFloat); }, 1, 1e-2);
  half(
      "AnF32GradientOfABf16ParameterRuleNone", [](at::Tensor& weight) { weight.set_grad_dtype(std::nullopt); }, 2,
      1e-2);

  half(
      "OneF32GradientOfABf16ParameterRuleNone", [](at::Tensor& weight) { weight.set_grad_dtype(std::nullopt); }, 1,
      1e-2);
  half(
      "AnF32GradientOfABf16ParameterRuleBf16", [](at::Tensor& weight) { weight.set_grad_dtype(at::kBFloat16); }, 1,
      2e-2);
  {
    Scenario scenario{"N1", "TheRuleChangesBetweenSteps",
                      [] { return std::make_shared<HalfWeight>([](at::Tensor&) {}); },
                      [](Stage& stage) {
                        const std::array<std::optional<at::ScalarType>, 4> rules = {at::kFloat, std::nullopt,
                                                                                    at::kBFloat16, at::kFloat};
                        for (size_t step = 0; step < rules.size(); ++step) {
                          stage.all([&] { stage.as<HalfWeight>().part->weight.set_grad_dtype(rules[step]); });
                          for (int micro = 0; micro < 2; ++micro) {
                            const auto x = stage.input({5, 3}, 100 * static_cast<int>(step) + micro);
                            stage.share(stage.as<HalfWeight>().loss(x)).backward();
                          }
                          stage.step();
                          stage.zero_grad();
                        }
                      }};
    scenario.optimizer = SGD{.lr = 0.05};
    scenario.options.master_weights = false;
    scenario.tolerance = 2e-2;
    all.push_back(scenario);
  }
  for (const bool twice : {false, true}) {
    Scenario scenario{
        "N1", twice ? "RawGradientsDeliveredSeveralTimes" : "RawGradientsDeliveredInAnyOrder",
        [] { return std::make_shared<HalfWeight>([](at::Tensor& weight) { weight.set_grad_dtype(at::kFloat); }); },
        [twice](Stage& stage) {
          const auto parameters = stage.model->parameters();
          for (int step = 0; step < 3; ++step) {
            for (int i = 0; i < (twice ? 4 : 2); ++i) {
              const auto& p = parameters[static_cast<size_t>((i + step + stage.rank) % 2)];
              stage.deliver(p, stage.input(p.sizes(), 10 * step + i));
            }
            stage.end_pass();
            // A pass of autograd's beside it, and one that brings raw gradients itself.
            stage.share(stage.as<HalfWeight>().loss(stage.input({5, 3}, step))).backward();
            stage.step();
            stage.zero_grad();
          }
        }};
    scenario.optimizer = SGD{.lr = 0.05};
    scenario.options.master_weights = false;
    scenario.tolerance = 1e-2;
    all.push_back(scenario);
  }
  {
    Scenario scenario{"N4", "NotANumberOnOneRankUnderLossScaling", [] { return std::make_shared<Net>(); },
                      [](Stage& stage) {
                        for (int step = 0; step < 8; ++step) {
                          auto x = stage.input({4, 6}, step);
                          if (step % 3 == 1 && stage.rank == stage.size - 1) x = x / 0.0;
                          stage.scale(stage.share(stage.as<Net>().loss(x))).backward();
                          stage.step();
                          stage.zero_grad();
                        }
                      }};
    scenario.options.loss_scale = LossScale{.initial = 1024, .interval = 2};
    scenario.options.clip_norm = 0.5;
    scenario.options.bucket_bytes = 300;
    all.push_back(scenario);
  }
  {
    Scenario scenario{"N3", "SeveralDtypesInOneModule",
                      [] {
                        auto model =
                            std::make_shared<Sizes>(std::vector<std::vector<int64_t>>{{7}, {3, 5}, {11}, {2, 2}, {13}});
                        auto weights = model->parameters();
                        for (size_t i = 0; i < weights.size(); ++i) {
                          at::NoGradGuard no_grad;
                          const auto dtype = std::array{at::kFloat, at::kDouble, at::kBFloat16}[i % 3];
                          weights[i].set_data(weights[i].to(dtype));
                        }
                        return model;
                      },
                      [](Stage& stage) {
                        for (int step = 0; step < 3; ++step) {
                          stage.share(stage.as<Sizes>().loss(stage.input({3}, step))).backward();
                          stage.step();
                          stage.zero_grad();
                        }
                      }};
    scenario.optimizer = SGD{.lr = 0.01};
    scenario.options.master_weights = false;
    scenario.tolerance = 2e-2;
    all.push_back(scenario);
  }
  for (const double limit : {0.05, 1e6}) {
    Scenario scenario{"N5", limit < 1 ? "ClippingByGlobalNormThatBites" : "ClippingByGlobalNormThatDoesNot",
                      [] { return std::make_shared<Net>(); },
                      [](Stage& stage) {
                        for (int step = 0; step < 3; ++step) {
                          stage.share(stage.as<Net>().loss(stage.input({4, 6}, step))).backward();
                          stage.step();
                          if (step == 1) stage.zero_grad();
                        }
                      }};
    scenario.options.clip_norm = limit;
    scenario.options.bucket_bytes = 300;
    scenario.options.first_bucket_bytes = 100;
    all.push_back(scenario);
  }
  {
    Scenario scenario{"N6", "SparseGradientsOfAnEmbedding",
                      [] {
                        struct Words : torch::nn::Module {
                          Words() { table = register_parameter("table", torch::randn({9, 4})); }
                          at::Tensor table;
                        };
                        return std::make_shared<Words>();
                      },
                      [](Stage& stage) {
                        const auto table = stage.model->parameters()[0];
                        for (int step = 0; step < 3; ++step) {
                          for (int micro = 0; micro < 2; ++micro) {
                            const auto words =
                                stage.input({6}, 10 * step + micro).abs().mul(4).to(at::kLong).clamp(0, 8);
                            stage.share(torch::embedding(table, words, -1, false, true).pow(2).sum()).backward();
                          }
                          stage.step();
                          stage.zero_grad();
                        }
                      }};
    scenario.optimizer = SGD{.lr = 0.05};
    all.push_back(scenario);
  }
  {
    Scenario scenario{
        "N6", "ComplexParameters",
        [] {
          struct Waves : torch::nn::Module {
            Waves() {
              wave = register_parameter("wave", torch::randn({3, 4}, at::kComplexFloat));
              real = register_parameter("real", torch::randn({4}));
            }
            at::Tensor wave, real;
          };
          return std::make_shared<Waves>();
        },
        [](Stage& stage) {
          const auto parameters = stage.model->parameters();
          for (int step = 0; step < 3; ++step) {
            const auto x = stage.input({4}, step);
            stage.share((parameters[0] * x).abs().pow(2).sum() + (parameters[1] * x).sin().sum()).backward();
            stage.step();
            stage.zero_grad();
          }
        }};
    scenario.optimizer = SGD{.lr = 0.05, .momentum = 0.9};
    all.push_back(scenario);
  }
  {
    Scenario scenario{"N0", "AdamWOverManySteps", [] { return std::make_shared<Net>(); },
                      [](Stage& stage) {
                        for (int step = 0; step < 10; ++step) {
                          // Parts that join later have younger optimizer state than their neighbours.
                          auto& net = stage.as<Net>();
                          const auto x = stage.input({4, 6}, step);
                          stage.share(step % 3 == 0 ? net.loss_left(x) : net.loss(x)).backward();
                          stage.step();
                          stage.zero_grad();
                        }
                      }};
    scenario.optimizer = AdamW{.lr = 0.01, .weight_decay = 0.1};
    scenario.tolerance = 1e-4;
    all.push_back(scenario);
  }
  return all;
}

std::vector<Scenario> world_scenarios() {
  std::vector<Scenario> all;
  all.push_back({"W3", "TheSameNumberOfBackwardsOnEveryRankHeldOrNot", [] { return std::make_shared<Net>(); },
                 [](Stage& stage) {
                   for (int micro = 0; micro < 4; ++micro) {
                     std::unique_ptr<NoSync> guard;
                     if (micro == 1) guard = stage.no_sync();
                     stage.share(stage.as<Net>().loss(stage.input({4, 6}, micro))).backward();
                   }
                   stage.step();
                 }});
  return all;
}

}  // namespace plumb::scenarios

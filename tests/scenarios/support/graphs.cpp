// Graphs: rows G1 to G12.
#include "scenarios/support/corpus.h"
#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

Scenario on_net(std::string id, std::string name, Program program) {
  Scenario scenario{std::move(id), std::move(name), [] { return std::make_shared<Net>(); }, std::move(program)};
  scenario.options.bucket_bytes = 300;
  scenario.options.first_bucket_bytes = 100;
  return scenario;
}

// Takes part in the graph, and has no gradient for its weight.
struct Silent : torch::autograd::Function<Silent> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

// The program for three steps, zeroing after each.
Program three_steps(std::function<void(Stage&, Net&, const at::Tensor&)> body) {
  return [body = std::move(body)](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      body(stage, stage.as<Net>(), stage.input({4, 6}, step));
      stage.step();
      stage.zero_grad();
    }
  };
}

// A unit that recomputes its inside.
struct ThriftyImpl : torch::nn::Module {
  ThriftyImpl() {
    up = register_module("up", torch::nn::Linear(6, 9));
    down = register_module("down", torch::nn::Linear(9, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto inside = [this](const at::Tensor& h) { return torch::tanh(down(torch::tanh(up(h)))); };
    return (plain ? inside(x) : plumb::checkpoint(inside, x)) + torch::linear(x, up->weight).matmul(up->weight);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  bool plain = false;
};
TORCH_MODULE(Thrifty);

struct ThriftyNet : torch::nn::Module {
  ThriftyNet() {
    first = register_module("first", Thrifty());
    second = register_module("second", Thrifty());
  }
  Unit<Thrifty> first{nullptr}, second{nullptr};
};

// Row G12. On the reference the functions run plainly.
std::vector<Scenario> checkpoint_scenarios() {
  std::vector<Scenario> all;
  auto add = [&](const char* name, std::function<void(Stage&, Net&, const at::Tensor&)> body) {
    all.push_back(on_net("G12", name, three_steps(std::move(body))));
  };
  const auto through = [](Stage& stage, auto body, const at::Tensor& x) {
    return stage.reference() ? body(x) : plumb::checkpoint(body, x);
  };
  add("CheckpointsOfAUnitEachAndAWeightInSeveral", [through](Stage& stage, Net& net, const at::Tensor& x) {
    const auto middle = [&net](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    const auto body = [&net](const at::Tensor& h) { return torch::tanh(net.body->forward(h)); };
    const auto h = through(stage, middle, through(stage, middle, through(stage, body, x)));
    stage.share((net.left->forward(h) + net.left->forward(middle(h))).pow(2).mean()).backward();
  });
  add("CheckpointsInsideACheckpointTwiceOverARetainedGraph", [through](Stage& stage, Net& net, const at::Tensor& x) {
    const auto inner = [&net](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    const auto outer = [&](const at::Tensor& h) {
      return through(stage, inner, through(stage, inner, torch::tanh(net.body->forward(h))));
    };
    const auto y = through(stage, outer, x);
    stage.share(net.left->forward(y).pow(2).mean()).backward({}, true);
    stage.share(net.right->forward(y).pow(2).mean()).backward();
  });
  add("GradientPenaltyThroughACheckpoint", [through](Stage& stage, Net& net, const at::Tensor& x) {
    const auto input = x.clone().requires_grad_();
    const auto loss = through(stage, [&net](const at::Tensor& h) { return net.loss(h); }, input);
    const auto gradient = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
    stage.share(loss + gradient.pow(2).sum()).backward();
  });
  add("AnExceptionInACheckpointThenARetry", [through](Stage& stage, Net& net, const at::Tensor& x) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      int runs = 0;
      // In the first attempt it throws when it runs again, inside the backward.
      const auto body = [&](const at::Tensor& h) {
        const auto y = torch::tanh(net.body->forward(h));
        if (attempt == 0 && ++runs == 2) throw std::runtime_error("planned");
        return torch::tanh(net.middle->forward(y));
      };
      try {
        auto loss = stage.share(net.left->forward(through(stage, body, x)).pow(2).mean());
        if (attempt == 0 && stage.reference()) throw std::runtime_error("planned");
        loss.backward();
        if (attempt == 0) throw std::logic_error("the planned exception did not come");
      } catch (const std::runtime_error&) {
      }
      if (attempt == 0) stage.zero_grad();
    }
  });
  add("CheckpointsUnderNoSyncOnSomeRanksOnly", [through](Stage& stage, Net& net, const at::Tensor& x) {
    const auto body = [&net](const at::Tensor& h) { return net.loss(h); };
    {
      const auto quiet = stage.no_sync();
      stage.share(stage.rank == 0 ? through(stage, body, x) : body(x)).backward();
    }
    stage.share(through(stage, body, x * 2)).backward();
  });
  Scenario inside{"G12", "CheckpointsInsideUnits", [] { return std::make_shared<ThriftyNet>(); },
                  [](Stage& stage) {
                    auto& net = stage.as<ThriftyNet>();
                    net.first.get()->plain = net.second.get()->plain = stage.reference();
                    for (int step = 0; step < 3; ++step) {
                      const auto y = net.second->forward(net.first->forward(stage.input({4, 6}, step)));
                      const auto loss = stage.share(y.pow(2).mean());
                      loss.backward({}, true);
                      if (step == 1) loss.backward();
                      stage.step();
                      stage.zero_grad();
                    }
                  }};
  inside.options.bucket_bytes = inside.options.first_bucket_bytes = 200;
  all.push_back(std::move(inside));
  return all;
}

}  // namespace

std::vector<Scenario> graph_scenarios() {
  std::vector<Scenario> all;
  auto add = [&](const char* id, const char* name, std::function<void(Stage&, Net&, const at::Tensor&)> body) {
    all.push_back(on_net(id, name, three_steps(std::move(body))));
  };

  add("G1", "TheSameLossTwiceOverARetainedGraph", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto loss = stage.share(net.loss(x));
    loss.backward({}, true);
    loss.backward();
  });
  add("G1", "TwoLossesOverOneRetainedForward", [](Stage& stage, Net& net, const at::Tensor& x) {
    const auto h = net.trunk(x);
    auto left = stage.share(net.left->forward(h).pow(2).mean());
    auto right = stage.share(net.right->forward(h).pow(2).mean());
    left.backward({}, true);
    right.backward();
  });
  add("G1", "TwoLossesOverOneRetainedForwardZeroingBetween", [](Stage& stage, Net& net, const at::Tensor& x) {
    const auto h = net.trunk(x);
    auto left = stage.share(net.left->forward(h).pow(2).mean());
    auto right = stage.share(net.right->forward(h).pow(2).mean());
    left.backward({}, true);
    stage.zero_grad();
    right.backward({}, true);
    left.backward();
  });
  add("G2", "OneBackwardOfTwoRoots", [](Stage& stage, Net& net, const at::Tensor& x) {
    torch::autograd::backward({stage.share(net.loss_left(x)), stage.share(net.loss_right(x))});
  });
  add("G2", "BackwardWithNamedInputs", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto loss = stage.share(net.loss(x));
    loss.backward({}, true, false, std::vector<at::Tensor>{net.left->weight, net.body->bias});
    loss.backward({}, false, false, std::vector<at::Tensor>{net.middle->weight});
  });
  add("G2", "ABackwardEnteredInTheMiddle", [](Stage& stage, Net& net, const at::Tensor& x) {
    const auto h = net.trunk(x);
    const auto y = net.left->forward(h);
    h.backward(stage.share(at::ones_like(h)), true);
    stage.share(y.pow(2).mean()).backward();
  });
  add("G3", "AutogradGradLeavesEverythingAlone", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto loss = stage.share(net.loss(x));
    torch::autograd::grad({loss}, {net.left->weight, net.body->weight}, {}, true);
    loss.backward({}, true);
    torch::autograd::grad({loss}, {net.middle->weight}, {}, true);
    torch::autograd::grad({net.loss_right(x)}, net.right->parameters());
  });
  add("G4", "GradientPenaltyOnTheInput", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto input = x.clone().requires_grad_();
    auto loss = net.loss(input);
    auto gradient = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
    stage.share(loss + gradient.pow(2).sum()).backward();
  });
  add("G4", "GradientPenaltyOnAWeight", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto loss = net.loss(x);
    auto gradient = torch::autograd::grad({loss}, {net.middle->weight}, {}, true, true)[0];
    stage.share(loss + gradient.pow(2).sum()).backward();
  });
  add("G4", "BackwardThatCreatesAGraph", [](Stage& stage, Net& net, const at::Tensor& x) {
    stage.share(net.loss(x)).backward({}, true, true);
    stage.share(net.loss_right(x)).backward();
  });
  add("G4", "OneBackwardThatCreatesAGraphAndNoOther",
      [](Stage& stage, Net& net, const at::Tensor& x) { stage.share(net.loss(x)).backward({}, true, true); });
  add("G4", "AGradientWithAGraphIsScaledByTheUser", [](Stage& stage, Net& net, const at::Tensor& x) {
    stage.share(net.loss(x)).backward({}, true, true);
    stage.all([&] {
      at::NoGradGuard no_grad;
      for (auto& p : net.parameters()) {
        if (p.grad().defined()) p.mutable_grad().detach().mul_(0.25);
      }
    });
  });
  add("G1", "RetainedGraphsThroughTheEnginesOwnBackward", [](Stage& stage, Net& net, const at::Tensor& x) {
    const auto loss = stage.share(net.loss(x));
    stage.backward(loss, true);
    stage.backward(loss, true);
    {
      const auto held = stage.no_sync();
      stage.backward(loss, true);
      stage.share(net.loss_right(x)).backward({}, true);
    }
    stage.backward(loss);
  });
  add("G5", "ReentrantCheckpointsAndAWeightInSeveral", [](Stage& stage, Net& net, const at::Tensor& x) {
    const Checkpoint::Body middle = [&net](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    const auto h = torch::tanh(net.body->forward(x));
    const auto y = checkpoint(middle, checkpoint(middle, h));
    stage.share((net.left->forward(y) + net.left->forward(middle(h))).pow(2).mean()).backward();
  });
  add("G5", "ACheckpointInsideACheckpoint", [](Stage& stage, Net& net, const at::Tensor& x) {
    const Checkpoint::Body inner = [&net](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    const Checkpoint::Body outer = [&](const at::Tensor& h) { return checkpoint(inner, checkpoint(inner, h) + h); };
    const auto h = torch::tanh(net.body->forward(x));
    stage.share(net.left->forward(checkpoint(outer, h)).pow(2).mean()).backward();
  });
  add("G5", "ABackwardInsideAHook", [](Stage& stage, Net& net, const at::Tensor& x) {
    const auto h = net.trunk(x);
    const auto side = stage.share(net.loss_spare(x));
    h.register_hook([side](const at::Tensor& gradient) {
      side.backward({}, true);
      return gradient;
    });
    stage.share(net.left->forward(h).pow(2).mean()).backward();
  });
  add("G5", "ALateGradientOnOneRankBesideParametersOthersDoNotUse", [](Stage& stage, Net& net, const at::Tensor& x) {
    const Checkpoint::Body middle = [&net](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    const auto h = torch::tanh(net.body->forward(x));
    const auto y = stage.rank == 0 ? checkpoint(middle, checkpoint(middle, h)) : middle(h);
    stage.share(stage.rank % 2 == 0 ? net.left->forward(y).pow(2).mean() : net.right->forward(y).pow(2).mean())
        .backward();
  });
  add("G5", "ALateGradientAfterAnUndefinedOne", [](Stage& stage, Net& net, const at::Tensor& x) {
    const Checkpoint::Body again = [&net](const at::Tensor& h) {
      return torch::tanh(torch::linear(h, net.spare->weight).matmul(net.spare->weight));
    };
    auto h = torch::tanh(net.body->forward(x));
    if (stage.rank == 0) {
      h = Silent::apply(checkpoint(again, h), net.spare->weight);
      stage.share(net.left->forward(h).pow(2).mean()).backward();
    } else {
      stage.share(net.left->forward(h).pow(2).mean() + torch::linear(h, net.spare->weight).sum()).backward();
    }
  });
  // The first two steps teach the engine to expect one gradient of the weight; the third brings a second one, late.
  all.push_back(on_net("G5", "AnUnexpectedLateGradientAfterAnUndefinedOne", [](Stage& stage) {
    auto& net = stage.as<Net>();
    const Checkpoint::Body again = [&net](const at::Tensor& h) {
      return torch::tanh(torch::linear(h, net.spare->weight).matmul(net.spare->weight));
    };
    for (int step = 0; step < 3; ++step) {
      auto h = torch::tanh(net.body->forward(stage.input({4, 6}, step)));
      if (step == 2 && stage.rank == 0) {
        h = Silent::apply(checkpoint(again, h), net.spare->weight);
        stage.share(net.left->forward(h).pow(2).mean()).backward();
      } else {
        stage.share(net.left->forward(h).pow(2).mean() + torch::linear(h, net.spare->weight).sum()).backward();
      }
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(on_net("G5", "AnUnexpectedLateGradientBesideParametersOthersDoNotUse", [](Stage& stage) {
    auto& net = stage.as<Net>();
    const Checkpoint::Body middle = [&net](const at::Tensor& h) { return torch::tanh(net.middle->forward(h)); };
    for (int step = 0; step < 3; ++step) {
      const auto h = torch::tanh(net.body->forward(stage.input({4, 6}, step)));
      const bool late = step == 2 && stage.rank == 0;
      const auto y = late ? checkpoint(middle, checkpoint(middle, h)) : middle(h);
      const bool left = step < 2 || stage.rank % 2 == 0;
      stage.share(left ? net.left->forward(y).pow(2).mean() : net.right->forward(y).pow(2).mean()).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  // When the gradient of layer `from` arrives, reductions of those behind it are on their way, and rank 0 brings another
  // gradient of the next of them.
  const auto late_behind = [](const char* name, size_t from) {
    Scenario scenario{"G5", name, [] { return std::make_shared<Alike>(5); },
                      [from](Stage& stage) {
                        auto& layers = stage.as<Alike>().layers;
                        for (int step = 0; step < 3; ++step) {
                          const auto x = stage.input({4, 6}, step);
                          at::Tensor h = x;
                          std::vector<at::Tensor> between;
                          for (auto& layer : layers) between.push_back(h = torch::tanh(layer->forward(h)));
                          if (step == 2 && stage.rank == 0) {
                            between[from].register_hook([&, from](const at::Tensor& gradient) {
                              at::AutoGradMode on(true);
                              stage.share(layers[from + 1]->forward(x).pow(2).mean()).backward();
                              return gradient;
                            });
                          }
                          stage.share(h.pow(2).mean()).backward();
                          stage.step();
                          stage.zero_grad();
                        }
                      }};
    scenario.options.bucket_bytes = scenario.options.first_bucket_bytes = 200;
    return scenario;
  };
  all.push_back(late_behind("ALateGradientOfTheSecondOfTwoReductionsOnTheWay", 2));
  all.push_back(late_behind("ALateGradientOfTheLastReductionBeforeTheEndOfTheBackward", 0));
  add("G6", "AModuleCalledTwice", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto h = torch::tanh(net.body->forward(x));
    for (int i = 0; i < 3; ++i) h = torch::tanh(net.middle->forward(h));
    stage.share(net.left->forward(h).pow(2).mean()).backward();
  });
  add("G7", "ParametersUnusedEverywhereInSomeBackwards", [](Stage& stage, Net& net, const at::Tensor& x) {
    stage.share(net.loss_left(x)).backward();
    stage.share(net.loss_left(x)).backward();
  });
  add("G7", "ParametersUsedOnTheLastRankOnly", [](Stage& stage, Net& net, const at::Tensor& x) {
    stage.share(stage.rank == stage.size - 1 ? net.loss_spare(x) : net.loss_left(x)).backward();
  });
  add("G7", "EveryRankUsesAnotherPart", [](Stage& stage, Net& net, const at::Tensor& x) {
    for (int micro = 0; micro < 3; ++micro) {
      const int part = (stage.rank + micro) % 3;
      stage.share(part == 0 ? net.loss_left(x) : part == 1 ? net.loss_right(x) : net.loss_spare(x)).backward();
    }
  });
  add("G7", "AnOutputThatNobodyUses", [](Stage& stage, Net& net, const at::Tensor& x) {
    const auto h = net.trunk(x);
    auto dead = net.spare->forward(h);
    stage.share(net.left->forward(h).pow(2).mean()).backward();
  });
  add("G8", "ARankWithNothingToContributeCallsTheEnginesBackward", [](Stage& stage, Net& net, const at::Tensor& x) {
    stage.backward(stage.rank == 0 && stage.size > 1 ? at::Tensor() : stage.share(net.loss(x)));
    stage.backward(stage.rank == 0 ? stage.share(net.loss_spare(x)) : stage.input({}).abs());
  });
  add("G9", "AnExceptionInBackwardThenARetry", [](Stage& stage, Net& net, const at::Tensor& x) {
    bool thrown = false;
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto h = net.trunk(x);
      if (attempt == 0) h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      try {
        stage.share(net.left->forward(h).pow(2).mean()).backward();
      } catch (const std::runtime_error&) {
        thrown = true;
      }
      if (attempt == 0) stage.zero_grad();
    }
    if (!thrown) throw std::logic_error("the planned exception did not come");
  });
  add("G9", "AnExceptionInBackwardOnOneRankThenARetry", [](Stage& stage, Net& net, const at::Tensor& x) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto h = net.trunk(x);
      if (attempt == 0 && stage.rank == 0)
        h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      try {
        stage.share(net.left->forward(h).pow(2).mean()).backward();
        if (attempt == 0 && stage.rank == 0) throw std::logic_error("the planned exception did not come");
      } catch (const std::runtime_error&) {
      }
      if (attempt == 0) stage.zero_grad();
    }
  });
  add("G9", "AnExceptionInBackwardKeepingThePartialGradients", [](Stage& stage, Net& net, const at::Tensor& x) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto h = net.trunk(x);
      if (attempt == 0) h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      try {
        stage.share(net.left->forward(h).pow(2).mean()).backward();
      } catch (const std::runtime_error&) {
      }
    }
  });
  add("G9", "AnExceptionInForwardThenARetry", [](Stage& stage, Net& net, const at::Tensor& x) {
    try {
      net.left->forward(net.trunk(x).narrow(1, 0, 3));
    } catch (const c10::Error&) {
    }
    stage.share(net.loss(x)).backward();
  });
  add("G10", "EvaluationBetweenForwardAndBackward", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto loss = stage.share(net.loss(x));
    {
      at::NoGradGuard no_grad;
      net.loss(x * 2);
    }
    {
      c10::InferenceMode inference;
      net.loss(stage.input({2, 6}, 99));
    }
    loss.backward();
  });
  add("G11", "ViewsAndInPlaceChangesOfOutputs", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto h = net.trunk(x) * 1;
    auto half = h.narrow(1, 0, 4);
    h.mul_(2);
    auto y = net.left->forward(h);
    y.relu_();
    const auto detached = net.right->forward(h).detach();
    stage.share(y.sum() + half.pow(2).sum() + detached.sum()).backward();
  });
  add("G11", "TensorHooksThatChangeTheGradient", [](Stage& stage, Net& net, const at::Tensor& x) {
    auto key = net.left->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    stage.share(net.loss(x)).backward();
    net.left->weight.remove_hook(key);
  });
  for (Scenario& scenario : checkpoint_scenarios()) all.push_back(std::move(scenario));
  {
    Scenario tied{"G6", "WeightsTiedAcrossModules", [] { return std::make_shared<Tied>(); },
                  [](Stage& stage) {
                    for (int step = 0; step < 3; ++step) {
                      const auto tokens = stage.input({3, 4}, step).abs().mul(3).to(at::kLong).clamp(0, 6);
                      stage.share(stage.as<Tied>().loss(tokens)).backward();
                      stage.step();
                      stage.zero_grad();
                    }
                  }};
    tied.options.bucket_bytes = 120;
    all.push_back(tied);
  }
  return all;
}

}  // namespace plumb::scenarios

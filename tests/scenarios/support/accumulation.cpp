// Accumulation and buckets: rows A1 to A7.
#include "scenarios/support/corpus.h"
#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

std::shared_ptr<torch::nn::Module> net() { return std::make_shared<Net>(); }

// Buckets small enough that the net has several, so that order, rebuild and overlap matter.
Options small_buckets() {
  Options options;
  options.bucket_bytes = 300;
  options.first_bucket_bytes = 100;
  return options;
}

Scenario on_net(std::string id, std::string name, Program program) {
  Scenario scenario{std::move(id), std::move(name), net, std::move(program)};
  scenario.options = small_buckets();
  return scenario;
}

Program accumulate_with_held(int held_from, int held_to) {
  return [=](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 4; ++micro) {
        std::unique_ptr<NoSync> guard;
        if (micro >= held_from && micro < held_to) guard = stage.no_sync();
        stage.share(stage.as<Net>().loss(stage.input({4, 6}, 10 * step + micro))).backward();
      }
      stage.step();
      stage.zero_grad();
    }
  };
}

void for_each_gradient(Stage& stage, const std::function<void(int, at::Tensor&)>& change) {
  stage.all([&] {
    int i = 0;
    for (auto& p : stage.model->parameters()) change(i++, p.mutable_grad());
  });
}

void one_backward(Stage& stage, int micro) { stage.share(stage.as<Net>().loss(stage.input({4, 6}, micro))).backward(); }

}  // namespace

std::vector<Scenario> accumulation_scenarios() {
  std::vector<Scenario> all;
  all.push_back(on_net("A1", "BackwardsEachReducedWithoutZeroGradBetween", [](Stage& stage) {
    for (int micro = 0; micro < 5; ++micro) {
      one_backward(stage, micro);
      if (micro % 2 == 1) stage.step();
    }
    stage.step();
  }));
  all.push_back(on_net("A1", "NoZeroGradEverOverSeveralSteps", [](Stage& stage) {
    for (int micro = 0; micro < 4; ++micro) {
      one_backward(stage, micro);
      stage.step();
    }
  }));
  all.push_back(on_net("A2", "RebuildAfterTheHeldBackwards", accumulate_with_held(0, 3)));
  all.push_back(on_net("A2", "RebuildBeforeTheHeldBackwards", accumulate_with_held(1, 3)));
  all.push_back(on_net("A2", "EveryBackwardHeldAndStepReduces", accumulate_with_held(0, 4)));
  all.push_back(on_net("A2", "HeldBackwardsAfterAReducedOneThenStep", accumulate_with_held(1, 4)));
  for (const auto& [name, from, to] : {std::tuple{"HeldWholeThenReduced", 0, 3},
                                       {"ReducedThenHeldWhole", 1, 4},
                                       {"HeldWholeBetweenReducedOnes", 1, 3},
                                       {"HeldWholeAllTheWay", 0, 4}}) {
    all.push_back(on_net("A2", name, accumulate_with_held(from, to)));
    all.back().options.hold_unsharded = true;
  }
  all.push_back(on_net("A2", "ForwardInsideNoSyncBackwardOutside", [](Stage& stage) {
    for (int step = 0; step < 2; ++step) {
      at::Tensor loss;
      {
        auto guard = stage.no_sync();
        loss = stage.share(stage.as<Net>().loss(stage.input({4, 6}, step)));
      }
      loss.backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  for (const bool to_none : {true, false}) {
    all.push_back(on_net("A3", to_none ? "ZeroGradToNoneAtAnyMoment" : "ZeroGradToZeroAtAnyMoment", [=](Stage& stage) {
      auto zero = [&] {
        for_each_gradient(stage, [&](int, at::Tensor& grad) {
          if (to_none)
            grad.reset();
          else if (grad.defined())
            grad.detach().zero_();
        });
      };
      zero();
      one_backward(stage, 0);
      zero();  // after a reduced backward
      one_backward(stage, 1);
      {
        auto guard = stage.no_sync();
        one_backward(stage, 2);
        zero();  // after a held backward, and before the one that counts
        one_backward(stage, 3);
      }
      one_backward(stage, 4);
      stage.step();
      one_backward(stage, 5);  // accumulates on what the step left
      zero();
      one_backward(stage, 6);
      stage.step();
    }));
  }
  all.push_back(on_net("A3", "StepRightAfterZeroGradChangesOnlyWhatMomentumDoes", [](Stage& stage) {
    one_backward(stage, 0);
    stage.step();
    stage.zero_grad();
    stage.step();
    one_backward(stage, 1);
    stage.step();
  }));
  all.push_back(on_net("A4", "AssignsGradientsOfOtherStorageAndStrides", [](Stage& stage) {
    for (int round = 0; round < 3; ++round) {
      for_each_gradient(stage, [&](int i, at::Tensor& grad) {
        const auto shape = stage.model->parameters()[i].sizes().vec();
        if (i % 3 == 0) grad = at::full(shape, 0.01 * (i + 1));
        if (i % 3 == 1 && shape.size() == 2) grad = at::full({shape[1], shape[0]}, 0.02 * (i + 1)).t();
      });
      one_backward(stage, round);
      stage.step();
      if (round == 1) stage.zero_grad();
    }
  }));
  all.push_back(on_net("A4", "AssignsGradientsAndStepsWithoutABackward", [](Stage& stage) {
    for_each_gradient(stage, [&](int i, at::Tensor& grad) {
      if (i != 2) grad = at::full_like(stage.model->parameters()[i].detach(), 0.1 * (i + 1));
    });
    stage.step();
    one_backward(stage, 0);
    stage.step();
  }));
  all.push_back(on_net("A4", "ScalesGradientsInPlaceAndSetsSomeToNone", [](Stage& stage) {
    for (int round = 0; round < 3; ++round) {
      one_backward(stage, 2 * round);
      for_each_gradient(stage, [&](int i, at::Tensor& grad) {
        if (!grad.defined()) return;
        if (i % 4 == 3)
          grad.reset();
        else
          grad.detach().mul_(0.5);
      });
      if (round != 1) one_backward(stage, 2 * round + 1);
      stage.step();
    }
  }));
  all.push_back(on_net("A4", "ReplacesGradientsByTheirClones", [](Stage& stage) {
    for (int round = 0; round < 3; ++round) {
      one_backward(stage, 2 * round);
      for_each_gradient(stage, [](int, at::Tensor& grad) {
        if (grad.defined()) grad = grad.clone() * 2;
      });
      one_backward(stage, 2 * round + 1);
      stage.step();
    }
  }));
  all.push_back(on_net("A4", "SwapsTheGradientsOfTwoParameters", [](Stage& stage) {
    auto swap = [&] {
      stage.all([&] {
        auto& net = stage.as<Net>();
        std::swap(net.body->bias.mutable_grad(), net.middle->bias.mutable_grad());
      });
    };
    one_backward(stage, 0);
    swap();
    one_backward(stage, 1);
    stage.step();
    swap();
    stage.step();
  }));
  all.back().refused_with_pieces = "is another parameter's piece";
  all.push_back(on_net("A4", "GivesTheTensorsOfGradientsOtherMemory", [](Stage& stage) {
    for (int round = 0; round < 4; ++round) {
      one_backward(stage, 2 * round);
      for_each_gradient(stage, [](int i, at::Tensor& grad) {
        if (!grad.defined()) return;
        at::NoGradGuard no_grad;
        if (i % 3 == 0) grad.set_data(at::full(grad.sizes(), 0.01 * (i + 1), grad.options()));
        if (i % 3 != 0 && grad.dim() == 2 && grad.size(0) == grad.size(1)) grad.t_();
      });
      if (round % 2 == 1) one_backward(stage, 2 * round + 1);
      stage.step();
      if (round == 1) stage.zero_grad();
    }
  }));
  all.back().refused_with_pieces = "of a piece of a gradient";
  all.push_back(on_net("A5", "TwoForwardsThenTwoBackwardsInOrder", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      auto first = stage.share(stage.as<Net>().loss(stage.input({4, 6}, 2 * step)));
      auto second = stage.share(stage.as<Net>().loss(stage.input({4, 6}, 2 * step + 1)));
      first.backward();
      second.backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(on_net("A5", "TwoForwardsThenTwoBackwardsInReverse", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      auto first = stage.share(stage.as<Net>().loss_left(stage.input({4, 6}, 2 * step)));
      auto second = stage.share(stage.as<Net>().loss_right(stage.input({4, 6}, 2 * step + 1)));
      second.backward();
      first.backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(on_net("A5", "OneBackwardOverTheSumOfTwoForwards", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      auto first = stage.as<Net>().loss(stage.input({4, 6}, 2 * step));
      auto second = stage.as<Net>().loss_spare(stage.input({4, 6}, 2 * step + 1));
      stage.share(first + second).backward();
      stage.step();
      stage.zero_grad();
    }
  }));
  // As methods that weigh the gradients of two tasks against each other do.
  all.push_back({"A4", "KeepsGradientsThatWereCleared", [] { return std::make_shared<Keeper>(); },
                 [](Stage& stage) {
                   auto& net = stage.as<Keeper>();
                   for (int step = 0; step < 3; ++step) {
                     stage.share(net.loss_left(stage.input({4, 6}, step))).backward();
                     stage.all([&] {
                       net.kept.clear();
                       for (auto& p : net.parameters()) {
                         net.kept.push_back(p.grad());
                         if (p.grad().defined() && p.dim() == 1) net.kept.back() = p.grad().detach().view({-1});
                         p.mutable_grad().reset();
                       }
                     });
                     stage.share(net.loss(stage.input({4, 6}, step + 10))).backward();
                     stage.all([&] {
                       at::NoGradGuard no_grad;
                       size_t next = 0;
                       for (auto& p : net.parameters()) {
                         const at::Tensor kept = net.kept[next++];
                         if (p.grad().defined() && kept.defined())
                           p.mutable_grad() = p.grad() * 0.5 + kept.view_as(p.grad());
                       }
                     });
                     stage.step();
                     stage.zero_grad();
                   }
                 }});
  all.push_back(on_net("A6", "FreezesBetweenForwardAndBackward", [](Stage& stage) {
    auto& net = stage.as<Net>();
    for (int step = 0; step < 3; ++step) {
      auto loss = stage.share(net.loss(stage.input({4, 6}, step)));
      stage.all([&] {
        net.middle->weight.set_requires_grad(step == 1);
        net.left->bias.set_requires_grad(step != 1);
      });
      loss.backward();
      stage.all([&] { net.middle->weight.set_requires_grad(true), net.left->bias.set_requires_grad(true); });
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(on_net("A6", "FreezesAfterTheFirstStep", [](Stage& stage) {
    for (int step = 0; step < 4; ++step) {
      if (step == 1) stage.all([&] { stage.as<Net>().body->weight.set_requires_grad(false); });
      if (step == 2) stage.all([&] { stage.as<Net>().left->weight.set_requires_grad(false); });
      one_backward(stage, step);
      stage.step();
      stage.zero_grad();
    }
  }));
  all.push_back(on_net("A6", "FreezesAndUnfreezesAgain", [](Stage& stage) {
    for (int step = 0; step < 5; ++step) {
      stage.all([&] { stage.as<Net>().middle->weight.set_requires_grad(step % 2 == 0); });
      one_backward(stage, step);
      stage.step();
      if (step % 3 == 2) stage.zero_grad();
    }
  }));
  {
    Scenario scenario = on_net("A6", "UnfreezesWhatWasFrozenWhenTheEngineWasBuilt", [](Stage& stage) {
      for (int step = 0; step < 5; ++step) {
        if (step == 2) stage.all([&] { stage.as<Net>().body->weight.set_requires_grad(true); });
        if (step == 3) stage.all([&] { stage.as<Net>().left->bias.set_requires_grad(true); });
        one_backward(stage, step);
        stage.step();
        stage.zero_grad();
      }
    });
    scenario.build = [] {
      auto model = std::make_shared<Net>();
      model->body->weight.set_requires_grad(false);
      model->left->bias.set_requires_grad(false);
      return model;
    };
    all.push_back(scenario);
    scenario.name = "AssignsAGradientToAFrozenParameter";  // found by the fuzzer
    scenario.program = [](Stage& stage) {
      stage.all([&] { stage.as<Net>().body->weight.mutable_grad() = at::full({8, 6}, 0.1); });
      stage.step();
      one_backward(stage, 0);
      stage.step();
    };
    all.push_back(scenario);
    scenario.name = "UnfreezesWhatOnlyOneRankUses";  // found by the fuzzer
    scenario.program = [](Stage& stage) {
      stage.all([&] { stage.as<Net>().left->bias.set_requires_grad(true); });
      auto& net = stage.as<Net>();
      const auto x = stage.input({4, 6});
      stage.share(stage.rank == 0 ? net.loss_left(x) : net.loss_right(x)).backward();
      stage.step();
    };
    all.push_back(scenario);
    scenario.name = "UnfreezesTheOnlyParameterThatIsReached";
    scenario.program = [](Stage& stage) {
      one_backward(stage, 0);
      stage.step();
      stage.zero_grad();
      stage.all([&] {
        for (auto& p : stage.model->parameters()) p.set_requires_grad(false);
        stage.as<Net>().body->weight.set_requires_grad(true);
      });
      for (int step = 1; step < 3; ++step) {
        one_backward(stage, step);
        stage.step();
      }
    };
    all.push_back(scenario);
  }
  all.push_back(on_net("A4", "ClipsAndNormalisesGradientsByTheirOwnNorms", [](Stage& stage) {
    for (int step = 0; step < 3; ++step) {
      one_backward(stage, 2 * step);
      one_backward(stage, 2 * step + 1);
      stage.all([&] {
        torch::nn::utils::clip_grad_norm_(stage.model->parameters(), 0.05);
        torch::nn::utils::clip_grad_norm_(stage.as<Net>().body->weight, 0.01);
        at::Tensor& middle = stage.as<Net>().middle->weight.mutable_grad();
        middle -= middle.mean();
        middle /= middle.norm() + 1e-3;
      });
      stage.step();
      if (step != 1) stage.zero_grad();
    }
  }));
  {
    Scenario scenario = on_net("A7", "ScalarEmptyTinyPrimeAndLargerThanABucket", [](Stage& stage) {
      for (int step = 0; step < 3; ++step) {
        stage.share(stage.as<Sizes>().loss(stage.input({3}, step))).backward();
        stage.step();
        stage.zero_grad();
      }
    });
    scenario.build = [] {
      return std::make_shared<Sizes>(
          std::vector<std::vector<int64_t>>{{}, {0}, {1}, {2}, {3}, {101}, {17, 23}, {0, 5}, {64}, {1, 1, 1}});
    };
    all.push_back(scenario);
    scenario.name = "ThousandsOfTinyParameters";
    scenario.optimizer = AdamW{.lr = 0.01};
    scenario.options = {};
    scenario.program = [](Stage& stage) {
      for (int step = 0; step < 2; ++step) {
        stage.share(stage.as<Sizes>().loss(stage.input({3}, step))).backward();
        stage.step();
        stage.zero_grad();
      }
    };
    scenario.build = [] { return std::make_shared<Sizes>(std::vector<std::vector<int64_t>>(2000, {3})); };
    scenario.tolerance = 1e-4;  // Adam divides tiny by tiny
    all.push_back(scenario);
  }
  return all;
}

}  // namespace plumb::scenarios

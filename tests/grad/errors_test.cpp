// What cannot be honoured ends in a clear error on every rank: rows W1, W3, W4, G8, and bad input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "errors.h"
#include "grad/support/leaf.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"

namespace plumb {
namespace {

using scenarios::Net;
using test::errors;
using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;

std::vector<std::string> errors_of_models(
    const std::function<NamedTensors(int rank)>& model,
    const std::function<Options(int)>& options = [](int) { return Options{}; }) {
  return errors(3, [&](World world) { Engine engine(world, model(world.rank()), {}, SGD{}, options(world.rank())); });
}

using test::leaf;

TEST(ModelCheck, NamesAnotherName) {
  EXPECT_THAT(
      errors_of_models([](int rank) { return NamedTensors{{"a", leaf({2})}, {rank == 1 ? "c" : "b", leaf({2})}}; }),
      Each(AllOf(HasSubstr("'c'"), HasSubstr("'b'"), HasSubstr("on rank 1"), HasSubstr("rank 0"))));
}
TEST(ModelCheck, NamesTwoSwappedParametersOfTheSameShape) {
  EXPECT_THAT(errors_of_models([](int rank) {
                return rank == 2 ? NamedTensors{{"b", leaf({2})}, {"a", leaf({2})}}
                                 : NamedTensors{{"a", leaf({2})}, {"b", leaf({2})}};
              }),
              Each(AllOf(HasSubstr("parameter 0 is 'b'"), HasSubstr("on rank 2"), HasSubstr("parameter 0 is 'a'"))));
}
TEST(ModelCheck, NamesAnotherShape) {
  EXPECT_THAT(errors_of_models([](int rank) { return NamedTensors{{"a", leaf({2, rank == 1 ? 3 : 4})}}; }),
              Each(AllOf(HasSubstr("[2, 3]"), HasSubstr("[2, 4]"))));
}
TEST(ModelCheck, NamesOtherStrides) {
  EXPECT_THAT(errors_of_models([](int rank) {
                auto weight = rank == 1 ? at::zeros({3, 3}).t() : at::zeros({3, 3});
                return NamedTensors{{"a", weight.requires_grad_()}};
              }),
              Each(AllOf(HasSubstr("strides [1, 3]"), HasSubstr("strides [3, 1]"))));
}
TEST(ModelCheck, NamesAnotherDtype) {
  EXPECT_THAT(
      errors_of_models([](int rank) { return NamedTensors{{"a", leaf({2}, rank == 1 ? at::kHalf : at::kBFloat16)}}; }),
      Each(AllOf(HasSubstr("Half"), HasSubstr("BFloat16"))));
}
TEST(ModelCheck, NamesAnotherRequiresGrad) {
  EXPECT_THAT(errors_of_models([](int rank) {
                return NamedTensors{{"a", leaf({2})}, {"b", rank == 1 ? at::zeros({2}) : leaf({2})}};
              }),
              Each(AllOf(HasSubstr("'b'"), HasSubstr("frozen"), HasSubstr("trained"))));
}
TEST(ModelCheck, NamesAMissingParameter) {
  EXPECT_THAT(errors_of_models([](int rank) {
                return rank == 1 ? NamedTensors{{"a", leaf({2})}} : NamedTensors{{"a", leaf({2})}, {"b", leaf({2})}};
              }),
              Each(HasSubstr("number of parameters is 1")));
}
TEST(ModelCheck, NamesOtherOptions) {
  EXPECT_THAT(errors_of_models([](int) { return NamedTensors{{"a", leaf({2})}}; },
                               [](int rank) {
                                 Options o;
                                 o.bucket_bytes = 100 + rank;
                                 return o;
                               }),
              Each(HasSubstr("bucket caps")));
}

TEST(Engine, RefusesAModelWithNothingToTrain) {
  EXPECT_THAT(errors(2, [](World world) { Engine engine(world, NamedTensors{{"a", at::zeros({2})}}, {}); }),
              Each(HasSubstr("nothing to train")));
  EXPECT_THAT(errors(1, [](World world) { Engine engine(world, NamedTensors{}, {}); }),
              Each(HasSubstr("no parameters")));
}
TEST(Engine, TellsEveryRankWhichRankHasAnUnusableModel) {
  const auto texts = errors(2, [](World world) {
    auto one = leaf({4});
    auto other = world.rank() == 1 ? one.detach().narrow(0, 0, 2).requires_grad_() : leaf({2});
    Engine engine(world, NamedTensors{{"one", one}, {"other", other}}, {});
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("rank 1"), HasSubstr("share memory")));
  EXPECT_THAT(texts[1], AllOf(HasSubstr("'one' and 'other' share memory")));
}
TEST(Engine, RefusesAParameterOnTwoDevices) {
  EXPECT_THAT(errors(1,
                     [](World world) {
                       Engine engine(world,
                                     NamedTensors{{"a", leaf({2})}, {"b", at::zeros({2}, at::kMeta).requires_grad_()}},
                                     {});
                     }),
              Each(AllOf(HasSubstr("'b' is on meta"), HasSubstr("cpu"))));
}
TEST(Engine, RefusesOneParameterInTwoEngines) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       auto shared = leaf({2});
                       Engine one(world, NamedTensors{{"a", shared}}, {});
                       Engine two(world, NamedTensors{{"b", shared}}, {});
                     }),
              Each(AllOf(HasSubstr("'b' belongs to another engine"))));
}
TEST(Engine, TakesAParameterOverWhenItsFirstEngineIsGone) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       auto shared = leaf({2});
                       {
                         Engine one(world, NamedTensors{{"a", shared}}, {});
                       }
                       Engine two(world, NamedTensors{{"a", shared}}, {}, SGD{.lr = 1});
                       (shared * (world.rank() + 1)).sum().backward();
                       two.step();
                       if (!at::allclose(shared.detach(), at::full({2}, -1.5)))
                         throw Error(c10::str("wrong: ", shared));
                     }),
              Each("none"));
}
TEST(Engine, RefusesBadOptions) {
  auto with = [](Options options, Optimizer optimizer = SGD{}) {
    return errors(
        1, [=](World world) { Engine engine(world, NamedTensors{{"a", leaf({2})}}, {}, optimizer, options); })[0];
  };
  Options options;
  options.strategy = "zero9";
  EXPECT_THAT(with(options), AllOf(HasSubstr("zero9"), HasSubstr("ddp")));
  options = {};
  options.bucket_bytes = 0;
  EXPECT_THAT(with(options), HasSubstr("must be positive"));
  options = {};
  options.clip_norm = -1;
  EXPECT_THAT(with(options), HasSubstr("clip_norm"));
  options = {};
  options.groups.push_back({[](const std::string& name) { return name == "foreign"; }, 1.0, {}});
  EXPECT_THAT(with(options), HasSubstr("matches no parameter"));
  EXPECT_THAT(with({}, AdamW{.beta1 = 1.5}), HasSubstr("betas"));
}

TEST(Ranks, WithDifferentNumbersOfBackwardsGetAnErrorNamingBothCounts) {
  for (const bool held : {false, true}) {
    const auto texts = errors(2, [&](World world) {
      auto weight = leaf({3});
      Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{});
      for (int i = 0; i < 2 - world.rank(); ++i) {
        std::unique_ptr<NoSync> guard;
        if (held) guard = std::make_unique<NoSync>(engine);
        weight.sum().backward();
      }
      engine.step();
    });
    EXPECT_THAT(texts,
                Each(AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("2"), HasSubstr("after 1 backward"))));
  }
}
TEST(Ranks, OneWithoutABackwardMakesAnErrorOnAll) {
  const auto texts = errors(3, [](World world) {
    auto weight = leaf({3});
    Engine engine(world, NamedTensors{{"w", weight}}, {}, SGD{});
    if (world.rank() != 1) weight.sum().backward();
    engine.step();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("rank 1"), HasSubstr("after 0 backwards"))));
}
TEST(Ranks, OneWhoseBackwardFailsMakesAnErrorOnAllAndEveryoneCanRetry) {
  const auto texts = errors(3, [](World world) {
    auto a = leaf({3}), b = leaf({3});
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1});
    auto attempt = [&](bool fail) {
      auto h = a * 2;
      if (fail) h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      (h + b).sum().backward();
    };
    std::string text;
    try {
      attempt(world.rank() == 1);
    } catch (const std::exception& error) {
      text = error.what();
    }
    if (text.find(world.rank() == 1 ? "planned" : "failed on rank 1") == std::string::npos)
      throw Error("said: " + text);
    engine.zero_grad();
    attempt(false);
    engine.step();
    if (!at::allclose(a.detach(), at::full({3}, -2.0)) || !at::allclose(b.detach(), at::full({3}, -1.0)))
      throw Error("wrong numbers after the retry");
  });
  EXPECT_THAT(texts, Each("none"));
}
TEST(Ranks, ThatUnfreezeDifferentlyGetAnError) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       auto a = leaf({3});
                       auto b = at::zeros({3});
                       Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{});
                       if (world.rank() == 1) b.requires_grad_();
                       (a + b).sum().backward();
                       engine.step();
                     }),
              Each(HasSubstr("frozen or unfrozen differently")));
}
TEST(Ranks, ThatClearDifferentGradientsGetAnError) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       auto a = leaf({3});
                       Engine engine(world, NamedTensors{{"layer.a", a}}, {}, SGD{});
                       a.sum().backward();
                       if (world.rank() == 1) a.mutable_grad().reset();
                       engine.step();
                     }),
              Each(AllOf(HasSubstr("'layer.a'"), HasSubstr("cleared on rank 1"))));
}
// Between two backwards as before a step, and in every strategy: one process has one gradient to clear or to change.
TEST(Ranks, ThatClearOrChangeAReducedGradientAloneGetAnError) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    for (const bool between : {false, true}) {
      for (const bool clear : {false, true}) {
        const auto run = [&](bool alone) {
          return errors(4, [&](World world) {
            at::Tensor a = leaf({5}), b = leaf({70});
            Engine engine(world, {{"a", a}, {"layer.b", b}}, {}, SGD{.lr = 0.1}, {.strategy = strategy});
            for (int step = 0; step < 2; ++step) {
              (a.sum() + b.sum()).backward();
              if (!alone || (world.rank() == 2 && step == 1)) {
                if (clear) {
                  b.mutable_grad().reset();
                } else {
                  b.mutable_grad().mul_(0.5);
                }
              }
              if (between) (a.sum() + b.sum()).backward();
              engine.step();
              engine.zero_grad();
            }
          });
        };
        const std::string which =
            std::string(strategy) + (between ? " between" : " before") + (clear ? " clear" : " change");
        EXPECT_THAT(run(true), Each(AllOf(HasSubstr("'layer.b'"),
                                          HasSubstr(clear ? "cleared on rank 2" : "changed in place on rank 2"),
                                          HasSubstr("alike on every rank"))))
            << which;
        EXPECT_THAT(run(false), Each("none")) << which;
      }
    }
  }
}
// As Module::zero_grad(false) does it: .grad is a detached twin of what it was.
TEST(Ranks, ThatZeroAReducedGradientAloneGetAnError) {
  for (const char* strategy : {"ddp", "zero2"}) {
    EXPECT_THAT(errors(2,
                       [&](World world) {
                         at::Tensor a = leaf({50});
                         Engine engine(world, {{"layer.a", a}}, {}, SGD{.lr = 0.1}, {.strategy = strategy});
                         a.sum().backward();
                         if (world.rank() == 1) a.mutable_grad() = a.grad().detach().zero_();
                         engine.step();
                       }),
                Each(AllOf(HasSubstr("'layer.a'"), HasSubstr("changed in place on rank 1"))));
  }
}
// What is this rank's own until the next reduction may differ, also where it was added to what had been reduced.
TEST(Ranks, MayClearOrChangeWhatIsNotReducedYet) {
  for (const double reduced : {0, 1}) {
    EXPECT_THAT(errors(2,
                       [&](World world) {
                         at::Tensor a = leaf({5}), b = leaf({7});
                         Engine engine(world, {{"a", a}, {"b", b}}, {}, SGD{.lr = 1.0});
                         for (int step = 0; step < 2; ++step) {
                           if (reduced > 0) (a.sum() + b.sum()).backward();
                           {
                             const auto held = engine.no_sync();
                             (a.sum() + b.sum()).backward();
                           }
                           if (world.rank() == 0) b.mutable_grad().reset();
                           if (world.rank() == 1) a.mutable_grad().mul_(3);
                           (a.sum() + b.sum()).backward();
                           engine.step();
                           engine.zero_grad();
                         }
                         const double mine = reduced + 1;
                         if (!a.detach().eq(-2 * (1 + (mine + 3 * mine) / 2)).all().item<bool>())
                           throw Error("a is wrong");
                         if (!b.detach().eq(-2 * (1 + mine / 2)).all().item<bool>()) throw Error("b is wrong");
                       }),
                Each("none"))
        << reduced;
  }
}
TEST(Ranks, ThatChangeAParameterDifferentlyGetAnError) {
  for (const char* strategy : {"ddp", "zero2"}) {
    EXPECT_THAT(errors(3,
                       [&](World world) {
                         at::Tensor a = leaf({4}), b = leaf({70});
                         Engine engine(world, {{"a", a}, {"b", b}}, {}, SGD{.lr = 0.1}, {.strategy = strategy});
                         for (int step = 0; step < 3; ++step) {
                           (a.sum() + b.sum()).backward();
                           engine.step();
                           engine.zero_grad();
                           at::NoGradGuard no_grad;
                           a.fill_(step);  // alike
                           if (step == 1) b.fill_(world.rank() == 2 ? 1 : 2);
                           if (step == 0 && world.rank() == 1) b.add_(0);  // changes nothing
                         }
                       }),
                Each(AllOf(HasSubstr("'b'"), HasSubstr("other values on rank 2"))));
  }
}

// Of every length and width: also what is left behind the last whole word of it.
TEST(Ranks, ThatChangeAnyElementOfAParameterDifferentlyGetAnError) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const int64_t size : {1, 2, 3, 4, 5, 8, 9}) {
      for (const int64_t where : {int64_t{0}, size / 2, size - 1}) {
        EXPECT_THAT(errors(3,
                           [&](World world) {
                             at::Tensor a = leaf({size}, dtype), b = leaf({2});
                             Engine engine(world, {{"a", a}, {"b", b}}, {}, SGD{.lr = 0.1});
                             {
                               at::NoGradGuard no_grad;
                               a[where].fill_(world.rank() == 2 ? 1 : 2);
                             }
                             b.sum().backward();
                             engine.step();
                           }),
                    Each(AllOf(HasSubstr("'a'"), HasSubstr("other values on rank 2"))))
            << dtype << " " << where << " of " << size;
      }
    }
  }
}

// By one bit of each element, an even number of times.
TEST(Ranks, ThatChangeTheSignsOfAParameterDifferentlyGetAnError) {
  EXPECT_THAT(errors(2,
                     [&](World world) {
                       at::Tensor a = leaf({8}, at::kDouble);
                       Engine engine(world, {{"a", a}}, {}, SGD{.lr = 0.1});
                       {
                         at::NoGradGuard no_grad;
                         a.fill_(world.rank() == 1 ? -2 : 2);
                       }
                       engine.step();
                     }),
              Each(AllOf(HasSubstr("'a'"), HasSubstr("other values on rank 1"))));
}

// Every rank hears of it before anything is summed, and the step may be taken with other gradients.
TEST(Ranks, OneThatCannotTakeAGradientAtTheStepIsToldOfToAll) {
  for (const std::string strategy : {"ddp", "zero1", "zero2"}) {
    for (const bool reduced : {false, true}) {
      for (const at::Tensor& wrong : {at::ones({4, 2}), at::ones({8}, at::kDouble), at::ones({1, 3})}) {
        const auto texts = errors(2, [&](World world) {
          at::Tensor a = at::zeros({8}).requires_grad_(), b = at::zeros({8}).requires_grad_();
          Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, SGD{.lr = 1}, {.strategy = strategy});
          std::string said;
          for (int step = 1; step <= 2; ++step) {
            if (reduced) (a.sum() + b.sum()).backward();
            if (world.rank() == 1) a.mutable_grad() = wrong.clone();
            try {
              engine.step();
            } catch (const Error& error) {
              said = error.what();
            }
            EXPECT_TRUE(engine.full_parameter(b).eq(1.0 - step).all().item<bool>()) << "nothing was updated";
            engine.zero_grad();
            (a.sum() + b.sum()).backward();
            engine.step();
            engine.zero_grad();
            EXPECT_TRUE(engine.full_parameter(a).eq(-step).all().item<bool>());
            EXPECT_TRUE(engine.full_parameter(b).eq(-step).all().item<bool>());
          }
          if (!said.empty()) throw Error(said);
        });
        EXPECT_THAT(texts[1], HasSubstr("the gradient of parameter 'a'"));
        EXPECT_THAT(texts[0], HasSubstr("was refused on rank 1"));
      }
    }
  }
}
TEST(Engine, RefusesAParameterThatUsesItsMemoryTwice) {
  EXPECT_THAT(errors(1,
                     [](World world) {
                       Engine engine(world, {{"w", at::zeros({1, 3}).expand({4, 3}).requires_grad_()}}, {}, SGD{});
                     }),
              Each(AllOf(HasSubstr("'w'"), HasSubstr("expanded"))));
}

TEST(Engine, GivesNoWholeGradientWhileOneIsHeld) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       at::Tensor w = leaf({4});
                       Engine engine(world, {{"w", w}}, {}, SGD{});
                       const auto quiet = engine.no_sync();
                       w.sum().backward();
                       engine.full_gradient(w);
                     }),
              Each(AllOf(HasSubstr("'w'"), HasSubstr("no_sync"))));
}

TEST(Engine, SaysSoWhenAHookTakesAGradientAway) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       auto a = leaf({3});
                       Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{});
                       auto node = torch::autograd::impl::grad_accumulator(a);
                       struct Thief : torch::autograd::PostAccumulateGradHook {
                         void operator()(const torch::autograd::Variable& v) override { v.mutable_grad().reset(); }
                       };
                       torch::autograd::impl::set_post_acc_grad_hooks(a, std::make_unique<Thief>());
                       a.sum().backward();
                     }),
              Each(AllOf(HasSubstr("'a'"), HasSubstr("a hook took it away"))));
}
TEST(Engine, RaisesAsTorchDoesWhenAGraphIsWalkedAfterItsParametersChanged) {
  EXPECT_THAT(errors(2,
                     [](World world) {
                       torch::nn::Linear one(3, 3), two(3, 3);
                       torch::nn::Sequential model(one, two);
                       Engine engine(world, *model, SGD{});
                       auto loss = model->forward(torch::ones({2, 3})).pow(2).sum();
                       loss.backward({}, true);
                       engine.step();
                       loss.backward();
                     }),
              Each(AnyOf(HasSubstr("modified by an inplace operation"), HasSubstr("failed on rank"))));
}
TEST(Engine, SaysSoWhenStepIsCalledInsideABackward) {
  EXPECT_THAT(errors(1,
                     [](World world) {
                       auto a = leaf({3});
                       Engine engine(world, NamedTensors{{"a", a}}, {}, SGD{});
                       auto h = a * 2;
                       auto order = a * 1;
                       h.register_hook([&](const at::Tensor& g) {
                         engine.step();
                         return g;
                       });
                       engine.backward(h.sum() + order.sum());
                     }),
              Each(HasSubstr("inside a backward")));
}

}  // namespace
}  // namespace plumb

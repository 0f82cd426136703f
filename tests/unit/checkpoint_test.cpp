// plumb::checkpoint: the bits of the plain program, in less memory, whatever is done with the graph.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "plumb/checkpoint.h"
#include "unit/support/net.h"
#include "unit/support/recompute.h"

namespace plumb {
namespace {

using namespace test;
using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;

struct Mlp : torch::nn::Module {
  Mlp() {
    torch::manual_seed(5);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
  }
  std::vector<torch::nn::Linear> layers;
};

struct Way {
  const char* name;
  std::function<void(Mlp&, const at::Tensor& x, const Through&)> walk;
};

at::Tensor layer(torch::nn::Linear linear, const at::Tensor& x) { return torch::tanh(linear(x)); }

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      {"EachLayer",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         at::Tensor h = x;
         for (auto& one : net.layers) h = through([one](const at::Tensor& in) { return layer(one, in); }, h);
         h.pow(2).sum().backward();
       }},
      {"AllLayersInOne",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         through(
             [layers = net.layers](at::Tensor h) {
               for (auto one : layers) h = layer(one, h);
               return h;
             },
             x)
             .pow(2)
             .sum()
             .backward();
       }},
      {"TheSameLossTwice",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         at::Tensor h = x;
         for (auto& one : net.layers) h = through([one](const at::Tensor& in) { return layer(one, in); }, h);
         auto loss = h.pow(2).sum();
         loss.backward({}, true);
         loss.backward();
       }},
      {"OneInsideAnother",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         auto outer = [layers = net.layers, through](at::Tensor h) {
           h = torch::sin(h) * 2;
           for (auto one : layers) h = through([one](const at::Tensor& in) { return layer(one, in) + in; }, h);
           return h.pow(2);
         };
         auto y = through(outer, through(outer, x));
         y.sum().backward({}, true);
         y.cos().sum().backward();
       }},
      {"GradientsOfGradients",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         auto input = x.clone().requires_grad_();
         at::Tensor h = input;
         for (auto& one : net.layers) h = through([one](const at::Tensor& in) { return layer(one, in); }, h);
         auto loss = h.pow(2).sum();
         auto gradient = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
         (loss + gradient.pow(2).sum()).backward();
       }},
      {"AGradientInsideTheFunction",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         auto y = through(
             [layers = net.layers](const at::Tensor& h) {
               auto a = layer(layers[0], h);
               auto slope = torch::autograd::grad({a.pow(2).sum()}, {a}, {}, true, true)[0];
               return layer(layers[1], a * slope);
             },
             x);
         y.sum().backward();
       }},
      {"SeveralInputsAndOutputsOfManyKinds",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         auto input = x.clone().requires_grad_();
         const auto [a, b] = through(
             [layers = net.layers](const at::Tensor& h, const Tensors& more, std::optional<at::Tensor> maybe,
                                   std::optional<at::Tensor> none, double factor, const at::Tensor& undefined) {
               EXPECT_FALSE(none.has_value());
               EXPECT_FALSE(undefined.defined());
               auto y = layer(layers[0], h * more[0]) + layer(layers[1], *maybe) * factor;
               return std::make_tuple(y.pow(2), torch::sin(y * more[1]));
             },
             input, Tensors{input * 2, x}, std::optional<at::Tensor>(x + input), std::optional<at::Tensor>(), 0.5,
             at::Tensor());
         (a.sum() + b.sum()).backward({}, true);
         b.pow(2).sum().backward();
       }},
      {"AnEntranceInTheMiddle",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         at::Tensor inside;
         auto y = through(
             [layers = net.layers, out = &inside](const at::Tensor& h) {
               auto a = layer(layers[0], h);
               if (!out->defined()) *out = a;
               return layer(layers[1], a);
             },
             x);
         inside.backward(torch::ones_like(inside), true);
         y.sum().backward();
       }},
      {"NamedInputs",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         at::Tensor h = x;
         for (auto& one : net.layers) h = through([one](const at::Tensor& in) { return layer(one, in); }, h);
         auto loss = h.pow(2).sum();
         loss.backward({}, true, false, Tensors{net.layers[1]->weight});
         loss.backward({}, false, false, Tensors{net.layers[0]->bias});
       }},
      {"Dropout",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         torch::manual_seed(11);
         at::Tensor h = x;
         for (auto& one : net.layers) {
           h = through([one](const at::Tensor& in) { return torch::dropout(layer(one, in), 0.5, true); }, h);
         }
         auto loss = (h * torch::rand_like(h)).sum();
         loss.backward({}, true);
         (h * torch::rand_like(h)).pow(2).sum().backward();  // the generator stands where it would
       }},
      {"DropoutInsideAnotherAndBehindTheLastSave",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         torch::manual_seed(12);
         auto outer = [layers = net.layers, through](at::Tensor h) {
           for (auto one : layers) {
             h = through([one](const at::Tensor& in) { return torch::dropout(layer(one, in), 0.5, true); }, h);
           }
           return h + torch::rand_like(h);
         };
         through(outer, torch::dropout(x, 0.5, true)).pow(2).sum().backward();
       }},
      {"Autocast",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         at::Tensor h = x;
         at::autocast::set_autocast_enabled(at::kCPU, true);
         at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
         for (auto& one : net.layers) h = through([one](const at::Tensor& in) { return layer(one, in); }, h);
         at::autocast::set_autocast_enabled(at::kCPU, false);
         at::autocast::clear_cache();
         h.to(at::kFloat).pow(2).sum().backward();
         EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
       }},
      {"AnExceptionInTheFunctionThenAnother",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         EXPECT_THROW(through(
                          [one = net.layers[0]](const at::Tensor& in) -> at::Tensor {
                            layer(one, in);
                            throw std::runtime_error("planned");
                          },
                          x),
                      std::runtime_error);
         through([one = net.layers[0]](const at::Tensor& in) { return layer(one, in); }, x).sum().backward();
       }},
      {"AnExceptionInTheMiddleOfABackwardThenAnother",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         auto h = through([one = net.layers[0]](const at::Tensor& in) { return layer(one, in); }, x);
         auto hook = h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
         auto loss = through([one = net.layers[1]](const at::Tensor& in) { return layer(one, in); }, h).sum();
         EXPECT_ANY_THROW(loss.backward({}, true));
         h.remove_hook(hook);
         for (auto& p : net.parameters()) p.mutable_grad().reset();
         loss.backward();
       }},
      {"WithoutGradients",
       [](Mlp& net, const at::Tensor& x, const Through& through) {
         at::NoGradGuard no_grad;
         auto y = through([one = net.layers[0]](const at::Tensor& in) { return layer(one, in); }, x);
         EXPECT_FALSE(y.requires_grad());
       }},
  };
  return all;
}

class CheckpointWays : public testing::TestWithParam<size_t> {};

TEST_P(CheckpointWays, GiveTheBitsOfThePlainProgram) {
  const Way& way = ways()[GetParam()];
  const at::Tensor x = at::randn({4, 6}, at::detail::createCPUGenerator(3));
  Mlp plain, recomputed;
  way.walk(plain, x, {false});
  way.walk(recomputed, x, {true});
  for (const auto& expected : plain.named_parameters()) {
    const at::Tensor& found = recomputed.named_parameters()[expected.key()].grad();
    ASSERT_EQ(found.defined(), expected.value().grad().defined()) << expected.key();
    if (!found.defined()) continue;
    EXPECT_TRUE(found.equal(expected.value().grad())) << expected.key();
  }
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointWays, testing::Range<size_t>(0, ways().size()),
                         [](const auto& info) { return std::string(ways()[info.param].name); });

at::Tensor long_chain(at::Tensor h) {
  for (int i = 0; i < 8; ++i) h = torch::tanh(h * 1.01);
  return h;
}

TEST(Checkpoint, RunsOncePerBackwardAndNoFurtherThanNeeded) {
  int begun = 0, ended = 0;
  auto y = checkpoint(
      [&](const at::Tensor& x) {
        ++begun;
        auto h = long_chain(x);
        ++ended;
        return h + 1;  // saves nothing
      },
      torch::ones({3}).requires_grad_());
  EXPECT_EQ(begun, 1);
  y.sum().backward({}, true);
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);  // stopped at the last tensor it had saved
  y.sum().backward();
  EXPECT_EQ(begun, 3);
}

// A node may ask for what it saved more than once.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
    const at::Tensor first = context->get_saved_variables()[0], second = context->get_saved_variables()[0];
    return {gradients[0] * (first + second)};
  }
};

TEST(Checkpoint, GivesANodeWhatItSavedAsOftenAsItAsks) {
  const at::Tensor x = torch::tensor({1.0F, 2.0F}).requires_grad_(), same = x.detach().clone().requires_grad_();
  const auto function = [](const at::Tensor& h) { return AsksTwice::apply(AsksTwice::apply(h.pow(3))); };
  checkpoint(function, x).sum().backward();
  function(same).sum().backward();
  EXPECT_TRUE(x.grad().equal(same.grad())) << x.grad();
}

// Eight checkpoints of eight activations each: between forward and backward one activation per checkpoint is alive, in the
// backward those of one more.
TEST(Checkpoint, KeepsTheInputsAndOneFunctionsActivations) {
  constexpr int64_t kBytes = 1 << 20;
  const auto measure = [&](const Through& through) {
    const auto meter = std::make_shared<Meter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    at::Tensor h = torch::ones({kBytes / 4}).requires_grad_();
    const int64_t begin = meter->now;
    for (int i = 0; i < 8; ++i) h = through(long_chain, h);
    const int64_t held = meter->now - begin;
    meter->peak = meter->now;
    h.sum().backward();
    return std::pair(held / kBytes, (meter->peak - begin) / kBytes);
  };
  const auto [plain, plain_peak] = measure({false});
  const auto [held, peak] = measure({true});
  RecordProperty("plain", std::to_string(plain) + " then " + std::to_string(plain_peak));
  RecordProperty("recomputed", std::to_string(held) + " then " + std::to_string(peak));
  std::printf("activations held, and at most, in units of one: plain %ld %ld, recomputed %ld %ld\n", plain, plain_peak,
              held, peak);
  EXPECT_GE(plain, 64);
  EXPECT_LE(held, 9);
  EXPECT_LE(peak, 9 + 8 + 6);
}

TEST(Checkpoint, LetsGoOfEverythingWithTheGraph) {
  const auto token = std::make_shared<int>(1);
  at::Tensor x = torch::ones({4}).requires_grad_();
  auto middle = x * 2;
  const auto weak = middle.getIntrusivePtr();
  auto y = checkpoint([token](const at::Tensor& h) { return long_chain(h); }, middle);
  middle.reset();
  EXPECT_EQ(token.use_count(), 2);
  y.sum().backward();
  EXPECT_EQ(token.use_count(), 1);  // a graph that was not retained is empty, also while its end is kept
  EXPECT_EQ(weak.use_count(), 1u);
}

// A graph that is retained, and a node that nobody reached, keep no activations between backwards.
TEST(Checkpoint, KeepsNothingBetweenBackwards) {
  const auto meter = std::make_shared<Meter>();
  c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  at::Tensor x = torch::ones({1 << 18}).requires_grad_();
  const auto [used, unused] = checkpoint(
      [](const at::Tensor& h) {
        auto a = long_chain(h);
        return std::make_pair(a, long_chain(h));
      },
      x);
  const int64_t before = meter->now;
  for (int i = 0; i < 2; ++i) {
    used.sum().backward({}, true);
    x.mutable_grad().reset();
    EXPECT_LE(meter->now - before, 1 << 10);
  }
}

TEST(Checkpoint, AFunctionThatDoesSomethingElseTheSecondTimeIsAnError) {
  int run = 0;
  auto fewer = checkpoint([&](const at::Tensor& x) { return run++ == 0 ? long_chain(x) : torch::tanh(x); },
                          torch::ones({3}).requires_grad_());
  EXPECT_THAT([&] { fewer.sum().backward(); }, testing::Throws<Error>(testing::Property(
                                                   &Error::what, testing::HasSubstr("8 tensors for its backward the "
                                                                                    "first time and 1"))));
  // Of another shape, also in its last dimension alone, or of another dtype.
  const std::vector<std::pair<std::function<at::Tensor(const at::Tensor&)>, std::string>> others = {
      {[](const at::Tensor& x) { return x.narrow(0, 0, 2); }, "Float [2, 4]"},
      {[](const at::Tensor& x) { return x.narrow(1, 0, 2); }, "Float [3, 2]"},
      {[](const at::Tensor& x) { return x.to(at::kDouble); }, "Double [3, 4]"}};
  for (const auto& [change, second] : others) {
    run = 0;
    auto other = checkpoint([&](const at::Tensor& x) { return torch::tanh(run++ == 0 ? x : change(x)); },
                            torch::ones({3, 4}).requires_grad_());
    EXPECT_THAT([&] { other.sum().backward(); },
                testing::Throws<Error>(testing::Property(
                    &Error::what, testing::AllOf(testing::HasSubstr(second + " on cpu when it runs again"),
                                                 testing::HasSubstr("was Float [3, 4] on cpu the first time")))));
  }
}

TEST(Checkpoint, AnInputThatChangedIsAnErrorAsInPlainTorch) {
  auto x = torch::ones({3}).requires_grad_() * 1;
  auto y = checkpoint([](const at::Tensor& h) { return torch::sin(h); }, x);
  x.mul_(2);
  EXPECT_THAT([&] { y.sum().backward(); },
              testing::Throws<std::exception>(
                  testing::Property(&std::exception::what, testing::HasSubstr("modified by an inplace operation"))));
}

// The same numbers cannot come again when somebody else drew in between: an error, not another gradient.
TEST(Checkpoint, AnotherThreadThatDrawsMeanwhileIsNoticed) {
  int run = 0;
  const auto draw = [&](bool meanwhile) {
    return checkpoint(
        [&run, meanwhile](const at::Tensor& x) {
          auto h = torch::dropout(x, 0.5, true);
          if (meanwhile && run++ == 0) std::thread([] { torch::rand({1}); }).join();
          return torch::dropout(h, 0.5, true);
        },
        torch::ones({64}).requires_grad_());
  };
  auto disturbed = draw(true);
  EXPECT_THAT([&] { disturbed.sum().backward(); },
              testing::Throws<Error>(testing::Property(&Error::what, testing::HasSubstr("random numbers"))));
  draw(false).sum().backward();
  // A function that draws nothing does not care.
  run = 0;
  auto calm = checkpoint(
      [&run](const at::Tensor& x) {
        if (run++ == 0) std::thread([] { torch::rand({1}); }).join();
        return torch::sin(x);
      },
      torch::ones({4}).requires_grad_());
  calm.sum().backward();
}

// What a function may ask for besides its inputs: it finds the same both times, whatever the backward is called in; and the
// caller finds his own afterwards, also behind an exception.
TEST(Checkpoint, RunsAgainInTheStateOfTheFirstRunAndLeavesTheCallersAlone) {
  struct State {
    bool enabled, cached;
    at::ScalarType dtype;
    bool operator==(const State&) const = default;
    static State now() {
      return {at::autocast::is_autocast_enabled(at::kCPU), at::autocast::is_autocast_cache_enabled(),
              at::autocast::get_autocast_dtype(at::kCPU)};
    }
    void set() const {
      at::autocast::set_autocast_enabled(at::kCPU, enabled);
      at::autocast::set_autocast_cache_enabled(cached);
      at::autocast::set_autocast_dtype(at::kCPU, dtype);
    }
  };
  const State before = State::now();
  std::vector<State> states;
  for (const bool enabled : {false, true}) {
    for (const bool cached : {false, true}) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) states.push_back({enabled, cached, dtype});
    }
  }
  for (const State& first : states) {
    for (const State& caller : states) {
      for (const bool throws : {false, true}) {
        std::vector<State> seen;
        std::vector<std::vector<bool>> wants;
        const at::Tensor x = torch::ones({3}).requires_grad_(), plain = torch::ones({3}), whole = at::arange(3);
        first.set();
        const at::Tensor y = checkpoint(
            [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
              seen.push_back(State::now());
              wants.push_back({a.requires_grad(), b.requires_grad(), c.requires_grad(), at::GradMode::is_enabled()});
              if (throws && seen.size() == 2) throw std::runtime_error("planned");
              return (a * b * c).sin();
            },
            x, plain, whole);
        caller.set();
        if (throws) {
          EXPECT_ANY_THROW(y.sum().backward());
        } else {
          y.sum().backward();
        }
        const State after = State::now();
        before.set();
        at::autocast::clear_cache();
        ASSERT_EQ(seen.size(), 2u);
        EXPECT_TRUE(seen[0] == first && seen[1] == first);
        EXPECT_EQ(wants[0], (std::vector<bool>{true, false, false, true}));
        EXPECT_EQ(wants[1], wants[0]);
        EXPECT_TRUE(after == caller);
      }
    }
  }
}

// Weights change between steps: what autocast remembers of them is the region's alone, also where functions run again outside of it.
TEST(Checkpoint, LeavesNoCastsBehindForTheNextStep) {
  Mlp plain, recomputed;
  const at::Tensor x = at::randn({4, 6}, at::detail::createCPUGenerator(3));
  std::vector<std::vector<at::Tensor>> losses;
  for (const auto& [net, through] : {std::pair{&plain, Through{false}}, {&recomputed, Through{true}}}) {
    losses.emplace_back();
    for (int step = 0; step < 3; ++step) {
      at::Tensor h = x;
      at::autocast::increment_nesting();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      for (auto& one : net->layers) h = through([one](const at::Tensor& in) { return layer(one, in); }, h);
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      losses.back().push_back(h.to(at::kFloat).pow(2).sum());
      losses.back().back().backward();
      at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : net->parameters()) {
        parameter.sub_(parameter.grad());
        parameter.mutable_grad().reset();
      }
    }
  }
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_TRUE(losses[0][step].equal(losses[1][step])) << step << ": " << losses[0][step] << losses[1][step];
  }
}

TEST(Checkpoint, LeavesTheGeneratorAlone) {
  torch::manual_seed(1);
  auto y =
      checkpoint([](const at::Tensor& x) { return torch::dropout(x, 0.5, true); }, torch::ones({9}).requires_grad_());
  const auto expected = at::detail::getDefaultCPUGenerator().get_state();
  y.sum().backward();
  EXPECT_TRUE(at::detail::getDefaultCPUGenerator().get_state().equal(expected));
}

}  // namespace
}  // namespace plumb

// What an owner of a buffer may rely on: what autograd keeps, when the flag is set, which buffers are taken, what is frozen.
#include <torch/csrc/autograd/engine.h>
#include "libtorch.h"

#include <random>

#include "nn/delivery.h"
#include "nn/groups.h"
#include "nn/product.h"
#include "nn/support/fused.h"
#include "plumb/error.h"

namespace plumb::test {
namespace {

std::shared_ptr<MainGradSink> told(const at::Tensor& weight, at::ScalarType dtype = at::kFloat) {
  return attach_main_grad(
      weight, {.main_grad = at::zeros(weight.sizes(), at::TensorOptions(dtype)), .grad_added_to_main_grad = false},
      "w");
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

using testing::HasSubstr;

// ---- stand-ins

TEST(StandIn, IsSeenByEveryHookOnTheGradientAndNeverAccumulated) {
  for (const at::ScalarType rule : {at::kBFloat16, at::kFloat}) {
    Subject subject({.kind = Kind::linear, .dtype = at::kBFloat16});
    const at::Tensor& weight = subject.weights[0];
    weight.set_grad_dtype(rule);
    auto sink = told(weight);
    std::vector<at::Tensor> seen;
    for (int i = 0; i < 2; ++i) {
      weight.register_hook([&](const at::Tensor& gradient) { seen.push_back(gradient); });
    }
    for (int micro = 1; micro <= 3; ++micro) {
      subject.forward(subject.x).backward(subject.dy);
      ASSERT_EQ(seen.size(), 2U * micro);
      EXPECT_EQ(seen.back().scalar_type(), rule) << "of the leaf's rule, or autograd would make a copy of that dtype";
      EXPECT_EQ(seen.back().storage().nbytes(), seen.back().element_size());
      EXPECT_FALSE(weight.grad().defined());
    }
    // A hook's own gradient is the user's word, and accumulates.
    const at::Tensor ones = at::ones_like(weight).to(rule);
    weight.register_hook([&](const at::Tensor&) { return ones; });
    subject.forward(subject.x).backward(subject.dy);
    EXPECT_TRUE(weight.grad().equal(ones));
  }
}

TEST(StandIn, LeavesAGradientThatIsThereUntouched) {
  Subject subject({.kind = Kind::linear});
  const at::Tensor& weight = subject.weights[0];
  auto sink = told(weight);
  const at::Tensor mine = at::randn_like(weight).detach();
  weight.mutable_grad() = mine;
  const auto version = mine._version();
  subject.forward(subject.x).backward(subject.dy);
  EXPECT_TRUE(weight.grad().is_same(mine));
  EXPECT_EQ(mine._version(), version) << "nothing was added";
}

TEST(StandIn, IsOneForAWeightThatIsUsedTwiceSoThatAutogradAddsNothingUp) {
  Subject subject({.kind = Kind::linear});
  const at::Tensor& weight = subject.weights[0];
  auto sink = told(weight);
  const auto wanted = subject.reference(subject.x, subject.dy);
  std::vector<at::Tensor> seen;
  weight.register_hook([&](const at::Tensor& gradient) { seen.push_back(gradient); });
  (subject.forward(subject.x) + subject.forward(subject.x)).backward(subject.dy);
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].storage().nbytes(), seen[0].element_size());
  EXPECT_FALSE(weight.grad().defined());
  expect_close(sink->facts.main_grad, wanted[0] * 2, 5e-6);
}

TEST(StandIn, BesideAPlainUseLeavesThePlainGradient) {
  Subject subject({.kind = Kind::linear, .dtype = at::kDouble});
  const at::Tensor& weight = subject.weights[0];
  auto sink = told(weight, at::kDouble);
  const auto wanted = subject.reference(subject.x, subject.dy);
  for (int order = 0; order < 2; ++order) {
    weight.mutable_grad().reset();
    at::Tensor plain, fused;
    if (order == 0) plain = at::linear(subject.x, weight);
    fused = subject.forward(subject.x);
    if (order == 1) plain = at::linear(subject.x, weight);
    (plain + fused).backward(subject.dy);
    expect_close(weight.grad(), wanted[0], 1e-12);
    expect_close(sink->facts.main_grad, wanted[0] * (order + 1), 1e-12);
  }
  subject.forward(subject.x).backward(subject.dy);  // and a plain gradient stays what it was
  expect_close(weight.grad(), wanted[0], 1e-12);
}

TEST(StandIn, SurvivesABackwardThatFailedAndAGraphWalkedAgain) {
  Subject subject({.kind = Kind::linear});
  const at::Tensor& weight = subject.weights[0];
  auto sink = told(weight);
  Watch watch(weight);  // one accumulator for all of it
  bool fail = true;
  weight.register_hook([&](const at::Tensor&) {
    if (fail) throw std::runtime_error("a hook of the user's");
  });
  const at::Tensor y = subject.forward(subject.x);
  // Those that failed leave theirs, however many they were; none is taken for another's.
  std::mt19937_64 random(5);
  int good = 0;
  for (int i = 0; i < 40; ++i) {
    fail = i == 0 || random() % 3 == 0;
    if (fail) {
      EXPECT_ANY_THROW(y.backward(subject.dy, /*retain_graph=*/true));
    } else {
      y.backward(subject.dy, /*retain_graph=*/true);
      ++good;
    }
    ASSERT_FALSE(weight.grad().defined()) << i;
    ASSERT_EQ(watch.seen->fired, good) << i;
  }
  expect_close(sink->facts.main_grad, subject.reference(subject.x, subject.dy)[0] * 40, 1e-4);
}

// ---- the flag of a delayed gradient, as TransformerEngine sets it

TEST(Flag, OfADelayedGradientIsSetInTheBackwardSoThatNoHookAddsItsStandIn) {
  for (const Kind kind : {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp}) {
    Subject subject({.kind = kind, .delayed = true});
    std::vector<std::shared_ptr<MainGradSink>> sinks;
    for (const at::Tensor& weight : subject.weights) sinks.push_back(told(weight));
    bool hooked = false;
    subject.weights[0].register_hook([&](const at::Tensor&) {
      hooked = true;
      EXPECT_TRUE(*sinks[0]->facts.grad_added_to_main_grad);
    });
    subject.forward(subject.x).backward(subject.dy);
    EXPECT_TRUE(hooked);
    for (const auto& sink : sinks) EXPECT_TRUE(*sink->facts.grad_added_to_main_grad);
  }
}

TEST(Flag, IsNotSetAgainByBackwardDwWhichWouldHideTheNextPlainGradientFromAnOwnerWhoResetIt) {
  Subject subject({.kind = Kind::linear, .delayed = true});
  auto sink = told(subject.weights[0]);
  subject.forward(subject.x).backward(subject.dy);
  sink->facts.grad_added_to_main_grad = false;
  subject.backward_dw();
  EXPECT_FALSE(*sink->facts.grad_added_to_main_grad);
  expect_close(sink->facts.main_grad, subject.reference(subject.x, subject.dy)[0], 5e-6);
}

// ---- buffers

TEST(Buffer, OfAnotherShapeIsTakenWhereItsElementsLieInTheWeightsOrder) {
  for (const bool delayed : {false, true}) {
    Subject subject({.kind = Kind::grouped_linear, .delayed = delayed});
    const at::Tensor& weight = subject.weights[0];  // [5, 24, 16]
    const auto wanted = subject.reference(subject.x, subject.dy);
    const std::vector<std::vector<int64_t>> shapes = {
        {1920}, {120, 16}, {5, 384}, {5, 24, 16}, {5, 4, 6, 16}, {1, 5, 24, 1, 16}, {5, 24, 16, 1}, {5, 12, 2, 4, 4}};
    for (const auto& shape : shapes) {
      const at::Tensor flat = at::randn({3 + 1920});  // a part of a larger buffer, as Megatron lays them out
      const at::Tensor before = flat.clone();
      auto sink = attach_main_grad(weight, {.main_grad = flat.narrow(0, 3, 1920).view(shape)}, "w");
      subject.forward(subject.x).backward(subject.dy);
      if (delayed) subject.backward_dw();
      expect_close(flat.narrow(0, 3, 1920).view(weight.sizes()),
                   wanted[0] + f64(before).narrow(0, 3, 1920).view(weight.sizes()), 5e-6);
      EXPECT_TRUE(flat.narrow(0, 0, 3).equal(before.narrow(0, 0, 3)));
      EXPECT_EQ(sink->facts.main_grad.sizes(), at::IntArrayRef(shape)) << "the owner's stays as it is";
    }
    const std::vector<std::vector<int64_t>> others = {{5, 16, 24},    {16, 120}, {24, 80}, {1919},
                                                      {5, 24, 16, 2}, {},        {24, 16}};
    for (const auto& shape : others) {
      auto sink = attach_main_grad(weight, {.main_grad = at::zeros(shape)}, "w");
      const std::string error = error_of([&] {
        subject.forward(subject.x).backward(subject.dy);
        if (delayed) subject.backward_dw();
      });
      EXPECT_THAT(error, HasSubstr(c10::str("'w' has shape ", at::IntArrayRef(shape), "; expected [5, 24, 16]")));
      if (delayed) attach(weight, nullptr);
      if (delayed) subject = Subject({.kind = Kind::grouped_linear, .delayed = delayed});
      if (delayed) break;  // what failed stays put off
    }
  }
}

TEST(Buffer, ThatWouldRoundADoubleIsRefused) {
  Subject subject({.kind = Kind::linear, .dtype = at::kDouble});
  auto sink = told(subject.weights[0], at::kFloat);
  EXPECT_THAT(error_of([&] { subject.forward(subject.x).backward(subject.dy); }),
              HasSubstr("'w' is Float and would round; expected Double"));
}

TEST(Buffer, WithoutANameIsStillSaidToBeAWeights) {
  Subject subject({.kind = Kind::linear});
  auto sink = attach_main_grad(subject.weights[0], {.main_grad = at::zeros({3})});
  EXPECT_THAT(error_of([&] { subject.forward(subject.x).backward(subject.dy); }),
              HasSubstr("the gradient buffer of a weight has shape [3]"));
}

// ---- frozen weights

TEST(Frozen, SinceTheForwardAWeightGetsNothing) {
  for (const Kind kind : {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp}) {
    for (const bool delayed : {false, true}) {
      Subject subject({.kind = kind, .experts = nn::Experts::separate, .delayed = delayed});
      std::vector<std::shared_ptr<StepSink>> sinks;
      for (const at::Tensor& weight : subject.weights) {
        sinks.push_back(std::make_shared<StepSink>(at::zeros_like(weight).detach()));
        attach(weight, sinks.back());
      }
      const auto wanted = subject.reference(subject.x, subject.dy);
      const at::Tensor y = subject.forward(subject.x);
      const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(subject.weights[0]);
      subject.weights[0].set_requires_grad(false);
      y.backward(subject.dy, /*retain_graph=*/true);
      if (delayed) subject.backward_dw();
      for (size_t i = 0; i < sinks.size(); ++i) {
        EXPECT_EQ(sinks[i]->delivered, i == 0 ? 0 : 1);
        EXPECT_EQ(sinks[i]->outstanding, 0);
        if (i > 0) expect_close(sinks[i]->buffer, wanted[i], 5e-6);
      }
      // Asked for by name, it is computed all the same, as for a plain module.
      const auto asked = torch::autograd::grad({y}, {subject.x}, {subject.dy}, /*retain_graph=*/true);
      EXPECT_TRUE(asked[0].defined());
      EXPECT_EQ(sinks[0]->delivered, 0);
      // So is the weight's own, by an edge that was taken before.
      const auto own = torch::autograd::Engine::get_default_engine().execute(
          {torch::autograd::impl::gradient_edge(y)}, {subject.dy}, /*keep_graph=*/true, /*create_graph=*/false,
          /*accumulate_grad=*/false, {edge});
      ASSERT_TRUE(own[0].defined());
      expect_close(own[0], wanted[0], 5e-6);
      EXPECT_EQ(sinks[0]->delivered, 0);
    }
  }
}

// ---- the table once more, and what a delayed gradient without an owner obeys

TEST(Decide, GivesTheGradientItselfWhereItMayBeDifferentiatedAgain) {
  nn::Weight weight{.sink = std::make_shared<StepSink>(at::zeros({1}), Tell::by_stand_in), .wanted = true};
  for (const nn::When when : {nn::When::now, nn::When::delayed}) {
    const nn::Delivery row = nn::decide(weight, when);  // gradient mode is on
    EXPECT_FALSE(row.into_buffer);
    EXPECT_EQ(row.when, nn::When::now);
    EXPECT_EQ(row.returned, nn::Returned::gradient);
    at::NoGradGuard as_in_a_backward;
    EXPECT_EQ(nn::decide({.wanted = true}, when).when, when);
    EXPECT_FALSE(nn::decide({.wanted = true}, when).into_buffer);
    EXPECT_EQ(nn::decide(weight, when).when, when);
  }
}

TEST(Delayed, WithoutAnOwnerObeysTheLeafsRuleAndAddsUp) {
  for (const Kind kind : {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp}) {
    Subject subject({.kind = kind, .experts = nn::Experts::separate, .delayed = true, .dtype = at::kBFloat16});
    for (const at::Tensor& weight : subject.weights) weight.set_grad_dtype(at::kFloat);
    const auto wanted = subject.reference(subject.x, subject.dy);
    std::vector<at::Tensor> kept;  // as whoever looks at .grad once may keep it
    for (int micro = 1; micro <= 2; ++micro) {
      subject.forward(subject.x).backward(subject.dy);
      subject.backward_dw();
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_EQ(subject.weights[i].grad().scalar_type(), at::kFloat);
        expect_close(subject.weights[i].grad(), wanted[i] * micro, 2e-2);
        if (micro == 1) kept.push_back(subject.weights[i].grad());
        EXPECT_TRUE(kept[i].is_alias_of(subject.weights[i].grad())) << "autograd adds to what is there, too";
      }
    }
  }
}

// ---- bad input

TEST(BadInput, IsToldWithWhatWasFoundAndWhatWasExpected) {
  EXPECT_THAT(error_of([] { nn::Linear(nn::LinearOptions{.in = 0, .out = 1}); }),
              HasSubstr("a linear layer with a size of 0"));
  EXPECT_THAT(error_of([] { nn::Linear(nn::LinearOptions{.in = 1, .out = -1}); }),
              HasSubstr("a linear layer with a size of -1"));
  for (int which = 0; which < 3; ++which) {
    const int64_t a = which == 0 ? 0 : 1, b = which == 1 ? 0 : 1, c = which == 2 ? 0 : 1;
    EXPECT_THAT(error_of([&] { nn::GroupedLinear(nn::GroupedLinearOptions{.experts = a, .in = b, .out = c}); }),
                HasSubstr("a grouped linear layer with a size of 0"));
    EXPECT_THAT(error_of([&] { nn::GroupedMLP(nn::GroupedMLPOptions{.experts = a, .width = b, .hidden = c}); }),
                HasSubstr("a grouped mlp with a size of 0"));
    EXPECT_THAT(error_of([&] { nn::Router(a, b, c); }), HasSubstr("a router with a size of 0"));
  }
  EXPECT_THAT(error_of([] { nn::Router(4, 2, 3); }), HasSubstr("a router with 3 choices of 2 experts"));
  EXPECT_EQ(error_of([] { nn::Router(4, 2, 2); }), "no error");
  for (const Kind kind : {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp}) {
    Subject now({.kind = kind});
    EXPECT_THAT(error_of([&] { now.backward_dw(); }), HasSubstr("build it with delay_wgrad_compute"));
  }
  nn::Linear computed(nn::LinearOptions{.in = 3, .out = 2, .delay_wgrad_compute = true});
  const at::Tensor base = at::randn({2, 3}).requires_grad_();
  computed->weight = base * 2;
  EXPECT_THAT(error_of([&] { computed->forward(at::ones({1, 3})).sum().backward(); }),
              HasSubstr("the weight is computed from other tensors"));
  EXPECT_THAT(error_of([] { attach(at::Tensor(), nullptr); }), HasSubstr("attach was given no parameter"));
  EXPECT_THAT(error_of([&] { attach(base * 2, nullptr); }), HasSubstr("a tensor that is computed from others"));
}

TEST(BadInput, OfGroupedModulesIsAnErrorBeforeAnything) {
  nn::GroupedMLP mlp(nn::GroupedMLPOptions{.experts = 2, .width = 3, .hidden = 2});
  const auto sizes = [](const at::Tensor& counts) { return nn::Tokens::sizes(counts); };
  const at::Tensor x = at::randn({4, 3}), good = at::tensor({1, 3});
  const auto says = [&](const at::Tensor& input, const nn::Tokens& tokens, const at::Tensor& factors = {}) {
    return error_of([&] { mlp->forward(input, tokens, factors); });
  };
  EXPECT_EQ(says(x, sizes(good), at::ones({4})), "no error");
  EXPECT_THAT(says(x, sizes(good), at::ones({4, 1})), HasSubstr("the probabilities have shape [4, 1]; expected [4]"));
  EXPECT_THAT(says(x, sizes(good), at::ones({3})), HasSubstr("the probabilities have shape [3]; expected [4]"));
  EXPECT_THAT(says(x, sizes(good), at::ones({4}, at::kLong)), HasSubstr("the probabilities are Long on cpu"));
  EXPECT_THAT(says(x, sizes(good), at::ones({4}, at::TensorOptions(at::kMeta))), HasSubstr("Float on meta"));
  EXPECT_THAT(says(at::randn({4}), sizes(good)), HasSubstr("the input has shape [4]; expected [rows, 3]"));
  EXPECT_THAT(says(at::randn({4, 2}), sizes(good)), HasSubstr("the input has shape [4, 2]; expected [rows, 3]"));
  EXPECT_THAT(says(x, sizes(at::Tensor())), HasSubstr("token counts of shape []; expected [2]"));
  EXPECT_THAT(says(x, sizes(good.view({1, 2}))), HasSubstr("token counts of shape [1, 2]"));
  EXPECT_THAT(says(x, sizes(at::zeros({2}, at::kBool))), HasSubstr("token counts are Bool; expected integers"));
  EXPECT_THAT(says(x, sizes(good.to(at::kMeta))), HasSubstr("token counts are on meta"));
  EXPECT_THAT(says(x, sizes(at::tensor({5, -1}))), HasSubstr("expert 1 is given -1 tokens; expected 0 to 4"));
  EXPECT_THAT(says(x, nn::Tokens::ends(at::tensor({-1, 4}))), HasSubstr("expert 0 is given -1 tokens"));
  const at::Tensor huge = at::zeros({1, 3}).expand({int64_t{1} << 31, 3});
  EXPECT_THAT(says(huge, sizes(good)), HasSubstr("2147483648 rows; at most 2147483647"));
}

// ---- how modules start

TEST(Modules, StartUniformlyInOneOverTheRootOfTheInputs) {
  torch::manual_seed(7);
  const auto check = [](const at::Tensor& parameter, at::IntArrayRef sizes, int64_t in) {
    ASSERT_EQ(parameter.sizes(), sizes);
    ASSERT_TRUE(parameter.is_leaf() && parameter.requires_grad());
    const double bound = 1 / std::sqrt(static_cast<double>(in));
    EXPECT_LE(parameter.abs().max().item<double>(), bound);
    EXPECT_GT(parameter.max().item<double>(), 0.8 * bound);
    EXPECT_LT(parameter.min().item<double>(), -0.8 * bound);
  };
  for (const nn::Experts kind : {nn::Experts::grouped, nn::Experts::separate}) {
    const bool one = kind == nn::Experts::grouped;
    nn::GroupedLinear linear(
        nn::GroupedLinearOptions{.experts = 3, .in = 50, .out = 80, .weights = kind, .bias = true});
    nn::GroupedMLP mlp(nn::GroupedMLPOptions{.experts = 3, .width = 50, .hidden = 60, .weights = kind, .bias = true});
    nn::GroupedMLP gelu(nn::GroupedMLPOptions{
        .experts = 3, .width = 50, .hidden = 60, .activation = nn::Activation::gelu, .weights = kind});
    for (size_t e = 0; e < (one ? 1U : 3U); ++e) {
      const auto sizes = [&](std::vector<int64_t> each) {
        if (one) each.insert(each.begin(), 3);
        return each;
      };
      check(linear->weights[e], sizes({80, 50}), 50);
      check(linear->biases[e], sizes({80}), 50);
      check(mlp->up[e], sizes({120, 50}), 50);
      check(mlp->up_biases[e], sizes({120}), 50);
      check(mlp->down[e], sizes({50, 60}), 60);
      check(mlp->down_biases[e], sizes({50}), 60);
      check(gelu->up[e], sizes({60, 50}), 50);
    }
    EXPECT_EQ(mlp->parameters().size(), one ? 4U : 12U);
    EXPECT_EQ(gelu->parameters().size(), one ? 2U : 6U);
    EXPECT_TRUE(gelu->up_biases.empty() && gelu->down_biases.empty());
    EXPECT_EQ(linear->named_parameters().keys()[0], one ? "weight" : "weight_0");
    EXPECT_EQ(linear->named_parameters().keys().back(), one ? "bias" : "bias_2");
  }
  nn::Linear linear(nn::LinearOptions{.in = 50, .out = 80});
  check(linear->weight, {80, 50}, 50);
  check(linear->bias, {80}, 50);
  check(nn::Router(50, 8, 2)->weight, {8, 50}, 50);
}

TEST(Groups, AreMadeOfTheHostsCountsForInputsOfAnyDevice) {
  for (const bool as_ends : {false, true}) {
    const at::Tensor given = as_ends ? at::tensor({2, 2, 5}) : at::tensor({2, 0, 3});
    const nn::Groups there(as_ends ? nn::Tokens::ends(given) : nn::Tokens::sizes(given), 3, 5, at::kMeta);
    EXPECT_EQ(there.sizes(), std::vector<int64_t>({2, 0, 3}));
    EXPECT_TRUE(there.ends().is_meta());
    EXPECT_THAT(error_of([&] { nn::Groups(nn::Tokens::sizes(given.to(at::kMeta)), 3, 5, at::kCPU); }),
                HasSubstr("token counts are on meta; expected the host or cpu, the input's device"));
  }
}

TEST(OneOver, NeedsOneBlockInOrderWithoutOverlapAtSixteenBytes) {
  const at::Tensor memory = at::randn({64});
  const auto at_offsets = [&](std::vector<int64_t> offsets) {
    std::vector<at::Tensor> all;
    for (const int64_t offset : offsets) all.push_back(memory.narrow(0, offset, 6).view({2, 3}));
    return nn::one_over(all);
  };
  const at::Tensor apart = at_offsets({4, 12, 20});
  ASSERT_TRUE(apart.defined());
  EXPECT_EQ(apart.sizes(), at::IntArrayRef({3, 2, 3}));
  EXPECT_TRUE(apart[2].equal(memory.narrow(0, 20, 6).view({2, 3})));
  EXPECT_FALSE(at_offsets({0, 6, 12}).defined()) << "24 bytes apart";
  EXPECT_FALSE(at_offsets({0, 4, 8}).defined()) << "one over another";
  EXPECT_FALSE(at_offsets({12, 4}).defined()) << "backwards";
  EXPECT_FALSE(at_offsets({0, 8, 20}).defined()) << "not evenly";
  const at::Tensor first = memory.narrow(0, 0, 8).view({2, 4});
  EXPECT_TRUE(nn::one_over({first}).defined());
  EXPECT_FALSE(nn::one_over({first, memory.narrow(0, 8, 8).view({4, 2})}).defined()) << "another shape";
  EXPECT_FALSE(nn::one_over({first, memory.narrow(0, 8, 8).view({4, 2}).t()}).defined()) << "another order";
  EXPECT_FALSE(nn::one_over({first, at::randn({64}).narrow(0, 8, 8).view({2, 4})}).defined()) << "other memory";
  EXPECT_FALSE(nn::one_over({first, memory.view(at::kInt).narrow(0, 8, 8).view({2, 4})}).defined()) << "another dtype";
}

}  // namespace
}  // namespace plumb::test

// Gradients of the modules against plain operations and finite differences, in every pattern of backwards.
#include "libtorch.h"

#include "nn/product.h"
#include "nn/support/fused.h"
#include "plumb/error.h"

namespace plumb::test {
namespace {

const Kind all_kinds[] = {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp};

std::vector<std::shared_ptr<StepSink>> own(const Subject& subject, Tell how = Tell::nothing) {
  std::vector<std::shared_ptr<StepSink>> sinks;
  for (const at::Tensor& weight : subject.weights) {
    auto sink =
        std::make_shared<StepSink>(at::full(weight.sizes(), std::numeric_limits<float>::quiet_NaN(),
                                            weight.options()
                                                .dtype(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
                                                .requires_grad(false)),
                                   how);
    attach(weight, sink);
    sinks.push_back(sink);
  }
  return sinks;
}

void expect_sums(const std::vector<std::shared_ptr<StepSink>>& sinks, const std::vector<at::Tensor>& wanted,
                 double times, double tolerance = 5e-6) {
  for (size_t i = 0; i < sinks.size(); ++i) expect_close(f64(sinks[i]->buffer), wanted[i] * times, tolerance);
}

TEST(Fused, EqualsTheUnfusedModuleForAnyTokensPerExpert) {
  for (const at::Device& device : devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Counts& counts : {Counts{0, 1, 17, 33, 0}, Counts{64, 0, 0}, Counts{0, 0, 50}, Counts{1}, Counts{0, 0},
                                   Counts{16, 32, 48}, Counts{130, 7, 129}}) {
        for (const Kind kind : {Kind::grouped_linear, Kind::grouped_mlp}) {
          for (const nn::Experts experts : {nn::Experts::grouped, nn::Experts::separate}) {
            for (const nn::Activation activation : {nn::Activation::swiglu, nn::Activation::gelu}) {
              if (kind == Kind::grouped_linear && activation == nn::Activation::gelu) continue;
              Subject subject({kind, experts, activation, false, device, dtype, counts});
              const double tolerance = dtype == at::kFloat ? 5e-6 : 1e-2;
              const auto wanted = subject.reference(subject.x, subject.dy);
              auto sinks = own(subject);
              const at::Tensor y = subject.forward(subject.x);
              std::vector<at::Tensor> copies;
              for (const at::Tensor& weight : subject.weights) copies.push_back(f64(weight));
              const at::Tensor x = f64(subject.x).requires_grad_();
              const at::Tensor plain = subject.plain(x, copies);
              expect_close(y, plain, tolerance);
              for (int step = 1; step <= 2; ++step) {
                subject.x.mutable_grad().reset();
                subject.forward(subject.x).backward(subject.dy);
                expect_sums(sinks, wanted, step, tolerance);
                for (const auto& sink : sinks) EXPECT_EQ(sink->delivered, step) << "no tokens still counts";
              }
              plain.backward(f64(subject.dy));
              if (x.numel() > 0) expect_close(subject.x.grad(), x.grad(), tolerance);
            }
          }
        }
      }
    }
  }
}

TEST(Fused, AgreesWithFiniteDifferencesInF64) {
  for (const Kind kind : all_kinds) {
    for (const nn::Activation activation : {nn::Activation::swiglu, nn::Activation::gelu}) {
      Subject subject({.kind = kind, .activation = activation, .dtype = at::kDouble, .counts = {2, 0, 3}});
      auto sinks = own(subject);
      const auto loss = [&](const at::Tensor& x) { return (subject.forward(x) * subject.dy).sum(); };
      subject.forward(subject.x).backward(subject.dy);
      std::vector<at::Tensor> values = {subject.x}, gradients = {subject.x.grad()};
      for (size_t i = 0; i < sinks.size(); ++i) {
        values.push_back(subject.weights[i]);
        gradients.push_back(sinks[i]->buffer);
      }
      at::NoGradGuard no_grad;
      for (size_t v = 0; v < values.size(); ++v) {
        const at::Tensor flat = values[v].view(-1);
        const double h = 1e-5;
        for (int64_t i = 0; i < flat.numel(); i += 7) {
          const double old = flat[i].item<double>();
          flat[i] = old + h;
          const double above = loss(subject.x).item<double>();
          flat[i] = old - h;
          const double below = loss(subject.x).item<double>();
          flat[i] = old;
          EXPECT_NEAR(gradients[v].view(-1)[i].item<double>(), (above - below) / (2 * h), 1e-6);
        }
      }
    }
  }
}

TEST(Fused, SumsMicroBatchesIntoTheSameBuffer) {
  for (const Kind kind : all_kinds) {
    for (const Tell how : {Tell::nothing, Tell::by_stand_in}) {
      Subject subject({.kind = kind});
      auto sinks = own(subject, how);
      const auto wanted = subject.reference(subject.x, subject.dy);
      for (int micro = 1; micro <= 4; ++micro) {
        subject.forward(subject.x).backward(subject.dy);
        expect_sums(sinks, wanted, micro);
      }
    }
  }
}

TEST(Fused, KeepsTheFlagUntilItsOwnerResetsIt) {
  Subject subject({.kind = Kind::linear});
  const at::Tensor& weight = subject.weights[0];
  auto sink = attach_main_grad(weight, {.main_grad = at::zeros_like(weight), .grad_added_to_main_grad = false});
  const auto wanted = subject.reference(subject.x, subject.dy);
  for (int micro = 1; micro <= 3; ++micro) {
    const at::Tensor y = subject.forward(subject.x);
    EXPECT_EQ(*sink->facts.grad_added_to_main_grad, micro > 1);
    y.backward(subject.dy);
    EXPECT_TRUE(*sink->facts.grad_added_to_main_grad);
    expect_close(sink->facts.main_grad, wanted[0] * micro, 1e-5);
  }
}

TEST(Fused, WalksARetainedGraphAgain) {
  for (const Kind kind : all_kinds) {
    for (const bool delayed : {false, true}) {
      Subject subject({.kind = kind, .delayed = delayed});
      auto sinks = own(subject);
      const auto wanted = subject.reference(subject.x, subject.dy);
      const at::Tensor y = subject.forward(subject.x);
      y.backward(subject.dy, /*retain_graph=*/true);
      y.backward(subject.dy);
      if (delayed) {
        for (const auto& sink : sinks) EXPECT_EQ(sink->outstanding, 2);
        subject.backward_dw();
      }
      expect_sums(sinks, wanted, 2);
      for (const auto& sink : sinks) EXPECT_EQ(sink->delivered, 2);
    }
  }
}

TEST(Fused, ServesAWeightThatIsUsedTwiceAndElsewhereToo) {
  Subject subject({.kind = Kind::linear, .dtype = at::kDouble});
  auto sinks = own(subject);
  Watch watch(subject.weights[0]);
  const auto wanted = subject.reference(subject.x, subject.dy);
  const at::Tensor plain = at::linear(subject.x, subject.weights[0]);
  (subject.forward(subject.x) + subject.forward(subject.x) + plain).backward(subject.dy);
  expect_sums(sinks, wanted, 2);
  expect_close(subject.weights[0].grad(), wanted[0], 1e-12);  // the plain use comes through autograd
  EXPECT_EQ(watch.seen->fired, 1);
}

// The recomputation runs the forward again inside the backward, as activation checkpointing does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Subject* subject) {
    context->save_for_backward({x});
    context->saved_data["subject"] = reinterpret_cast<int64_t>(subject);
    return subject->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& outputs) {
    const auto* subject = reinterpret_cast<const Subject*>(context->saved_data["subject"].toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    at::AutoGradMode on(true);
    subject->forward(x).backward(outputs[0]);
    return {x.grad(), {}};
  }
};

TEST(Fused, ContributesOnceUnderRecomputation) {
  for (const Kind kind : all_kinds) {
    for (const bool delayed : {false, true}) {
      Subject subject({.kind = kind, .delayed = delayed});
      auto sinks = own(subject);
      const auto wanted = subject.reference(subject.x, subject.dy);
      Recomputed::apply(subject.x, &subject).backward(subject.dy);
      if (delayed) subject.backward_dw();
      expect_sums(sinks, wanted, 1);
      for (const auto& sink : sinks) EXPECT_EQ(sink->delivered, 1);
    }
  }
}

TEST(Fused, LeavesTheBufferAloneUnderAutogradGrad) {
  for (const Kind kind : all_kinds) {
    for (const bool delayed : {false, true}) {
      for (const Tell how : {Tell::nothing, Tell::by_stand_in}) {
        Subject subject({.kind = kind, .delayed = delayed});
        auto sinks = own(subject, how);
        const auto wanted = subject.reference(subject.x, subject.dy);
        const at::Tensor y = subject.forward(subject.x);
        std::vector<at::Tensor> inputs = subject.weights;
        inputs.push_back(subject.x);
        const auto gradients = torch::autograd::grad({y}, inputs, {subject.dy}, /*retain_graph=*/true);
        for (size_t i = 0; i < sinks.size(); ++i) {
          expect_close(gradients[i], wanted[i], 5e-6);
          EXPECT_EQ(sinks[i]->delivered + sinks[i]->outstanding, 0);
          EXPECT_TRUE(sinks[i]->buffer.isnan().all().item<bool>());
        }
        torch::autograd::grad({y}, {subject.x}, {subject.dy}, /*retain_graph=*/true);
        EXPECT_EQ(sinks[0]->delivered + sinks[0]->outstanding, 0);
        // Named as an input of backward(), a weight accumulates as ever; the others get nothing.
        y.backward(subject.dy, false, false, std::vector<at::Tensor>{subject.weights[0]});
        if (delayed) subject.backward_dw();
        for (size_t i = 0; i < sinks.size(); ++i) EXPECT_EQ(sinks[i]->delivered, i == 0 ? 1 : 0);
        expect_close(sinks[0]->buffer, wanted[0], 5e-6);
        EXPECT_FALSE(subject.x.grad().defined());
      }
    }
  }
}

TEST(Fused, GivesGradientsThatCanBeDifferentiatedAgain) {
  for (const Kind kind : all_kinds) {
    Subject subject({.kind = kind, .dtype = at::kDouble, .counts = {2, 0, 3}});
    auto sinks = own(subject);
    int hooked = 0;
    subject.weights[0].register_hook([&](const at::Tensor& gradient) { hooked += gradient.defined() ? 1 : 0; });
    std::vector<at::Tensor> copies;
    for (const at::Tensor& weight : subject.weights) copies.push_back(f64(weight).requires_grad_());
    const at::Tensor x = f64(subject.x).requires_grad_();
    const auto penalty = [&](const at::Tensor& y, const at::Tensor& input, const std::vector<at::Tensor>& weights) {
      auto inputs = weights;
      inputs.push_back(input);
      at::Tensor sum = y.pow(2).sum();
      for (const auto& g : torch::autograd::grad({y.sin().sum()}, inputs, {}, true, /*create_graph=*/true)) {
        sum = sum + g.pow(2).sum();
      }
      return sum;
    };
    const auto wanted = torch::autograd::grad({penalty(subject.plain(x, copies), x, copies)}, copies);
    const at::Tensor y = subject.forward(subject.x);
    const at::Tensor loss = penalty(y, subject.x, subject.weights);
    EXPECT_EQ(hooked, 1);
    EXPECT_EQ(sinks[0]->delivered, 0);
    const auto got = torch::autograd::grad({loss}, subject.weights, {}, true);
    for (size_t i = 0; i < wanted.size(); ++i) expect_close(got[i], wanted[i], 1e-10);
    // A backward() that may be differentiated again delivers through autograd.
    subject.forward(subject.x).backward(subject.dy, true, /*create_graph=*/true);
    EXPECT_EQ(sinks[0]->delivered, 0);
    EXPECT_TRUE(subject.weights[0].grad().requires_grad());
    for (auto& weight : subject.weights) weight.mutable_grad().reset();  // breaks the cycle of weight and graph
    subject.x.mutable_grad().reset();
  }
}

TEST(Delayed, KeepsTheOrderAndLetsGoOfWhatItKept) {
  for (const Kind kind : all_kinds) {
    Subject subject({.kind = kind, .delayed = true});
    auto sinks = own(subject);
    const auto wanted = subject.reference(subject.x, subject.dy);
    at::Tensor dy = subject.dy.clone();
    subject.forward(subject.x).backward(dy);
    EXPECT_TRUE(subject.x.grad().defined()) << "the input's gradient is not delayed";
    EXPECT_GT(dy.use_count(), 1) << "kept";
    EXPECT_EQ(sinks[0]->outstanding, 1);
    EXPECT_EQ(sinks[0]->delivered, 0);
    subject.backward_dw();
    EXPECT_EQ(dy.use_count(), 1) << "let go";
    expect_sums(sinks, wanted, 1);
    subject.backward_dw();  // nothing is left to do
    expect_sums(sinks, wanted, 1);
  }
}

TEST(Delayed, StaysOutstandingWhenItFailsAndWhenItsModuleDies) {
  auto subject = std::make_unique<Subject>(test::Setup{.kind = Kind::linear, .delayed = true});
  auto sinks = own(*subject);
  const auto wanted = subject->reference(subject->x, subject->dy);
  subject->forward(subject->x).backward(subject->dy);
  subject->forward(subject->x).backward(subject->dy);
  const at::Tensor good = sinks[0]->buffer;
  sinks[0]->buffer = at::zeros({1});
  EXPECT_THROW(subject->backward_dw(), Error);
  EXPECT_EQ(sinks[0]->outstanding, 2);
  sinks[0]->buffer = good;
  subject->backward_dw();
  EXPECT_EQ(sinks[0]->outstanding, 0);
  expect_sums(sinks, wanted, 2);
  subject->forward(subject->x).backward(subject->dy);
  subject.reset();
  EXPECT_EQ(sinks[0]->outstanding, 1) << "the owner must notice at its next step";
}

// Of several that were put off, one cannot be written: those before it are done and let go, and none is written twice or lost.
TEST(Delayed, GoesOnAfterTheOneThatFailed) {
  struct Breaks final : StepSink {
    using StepSink::StepSink;
    GradTarget open() override { return {delivered == breaks_at ? at::zeros({1}) : buffer, delivered > 0}; }
    int breaks_at = -1;
  };
  constexpr int jobs = 3;
  for (const Kind kind : all_kinds) {
    for (int bad = 0; bad < jobs; ++bad) {
      for (size_t whose = 0; whose < (kind == Kind::grouped_mlp ? 2U : 1U); ++whose) {
        SCOPED_TRACE(c10::str("module ", static_cast<int>(kind), ", job ", bad, ", weight ", whose));
        const Subject subject({.kind = kind, .delayed = true});
        std::vector<std::shared_ptr<Breaks>> sinks;
        for (const at::Tensor& weight : subject.weights) {
          sinks.push_back(std::make_shared<Breaks>(at::full(weight.sizes(), NAN)));
          attach(weight, sinks.back());
        }
        std::vector<at::Tensor> sums(sinks.size()), dys;
        for (int job = 0; job < jobs; ++job) {
          dys.push_back(subject.dy * (job + 1.5));
          const auto mine = subject.reference(subject.x, dys.back());
          for (size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i].defined() ? sums[i] + mine[i] : mine[i];
          subject.forward(subject.x).backward(dys.back());
        }
        sinks[whose]->breaks_at = bad;
        for (int again = 0; again < 2; ++again) {
          EXPECT_THROW(subject.backward_dw(), Error);
          for (size_t i = 0; i < sinks.size(); ++i) {
            const int done = bad + (i < whose ? 1 : 0);  // each layer's gradient is put off by itself
            EXPECT_EQ(sinks[i]->delivered, done);
            EXPECT_EQ(sinks[i]->outstanding, jobs - done);
          }
          for (int job = 0; job < jobs; ++job) EXPECT_EQ(dys[job].use_count() > 1, job >= bad) << "kept: " << job;
        }
        sinks[whose]->breaks_at = -1;
        subject.backward_dw();
        for (size_t i = 0; i < sinks.size(); ++i) {
          EXPECT_EQ(sinks[i]->outstanding, 0);
          expect_close(f64(sinks[i]->buffer), sums[i], 5e-6);
        }
      }
    }
  }
}

TEST(Delayed, NeedsAModuleThatDelaysAndWeightsThatAreParameters) {
  Subject now({.kind = Kind::linear});
  EXPECT_THROW(now.backward_dw(), Error);
}

TEST(BadTokens, AreAnErrorBeforeAnything) {
  nn::GroupedLinear grouped(nn::GroupedLinearOptions{.experts = 3, .in = 8, .out = 8});
  const at::Tensor x = at::randn({10, 8});
  const auto error_of = [&](const nn::Tokens& tokens, const at::Tensor& input) -> std::string {
    try {
      grouped->forward(input, tokens);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  using nn::Tokens;
  using testing::HasSubstr;
  EXPECT_THAT(error_of(Tokens::sizes(at::tensor({3, 3, 3})), x), HasSubstr("add up to 9; expected 10"));
  EXPECT_THAT(error_of(Tokens::sizes(at::tensor({12, -2, 0})), x), HasSubstr("expert 1 is given -2 tokens"));
  EXPECT_THAT(error_of(Tokens::ends(at::tensor({4, 3, 10})), x), HasSubstr("expert 1 is given -1 tokens"));
  EXPECT_THAT(error_of(Tokens::ends(at::tensor({4, 6, 11})), x), HasSubstr("add up to 11; expected 10"));
  EXPECT_THAT(error_of(Tokens::sizes(at::tensor({5, 5})), x), HasSubstr("token counts of shape [2]; expected [3]"));
  EXPECT_THAT(error_of(Tokens::sizes(at::tensor({5.0, 5.0, 0.0})), x), HasSubstr("expected integers"));
  EXPECT_THAT(error_of(Tokens::sizes(at::tensor({5, 5, 0})), at::randn({10, 9})), HasSubstr("expected [rows, 8]"));
  EXPECT_EQ(error_of(Tokens::ends(at::tensor({5, 5, 10})), x), "no error");
}

// Grouped products of a device take one tensor: separate weights serve as one without a copy.
TEST(SeparateExperts, LieSideBySideWhereverTheirModuleIsMoved) {
  nn::MoE moe(nn::MoEOptions{.width = 16, .hidden = 8, .experts = 5, .weights = nn::Experts::separate});
  const auto packed = [&] {
    return nn::one_over(moe->experts->up).defined() && nn::one_over(moe->experts->down).defined();
  };
  EXPECT_TRUE(packed());
  const at::Tensor before = moe->experts->up[3].detach().clone();
  moe->to(at::kDouble);
  EXPECT_TRUE(packed());
  EXPECT_TRUE(nn::one_over(moe->experts->up)[3].equal(before.to(at::kDouble)));
  for (const at::Device device : devices()) {
    moe->to(device, at::kBFloat16);
    EXPECT_TRUE(packed());
    moe->to(device);
    EXPECT_TRUE(packed());
    EXPECT_TRUE(moe->experts->up[3].is_leaf() && moe->experts->up[3].requires_grad());
  }
  const at::Tensor elsewhere = nn::one_over(moe->experts->up).detach().clone();
  moe->experts->up[3].set_data(elsewhere[3]);  // at the right distance from the others, in other memory
  EXPECT_FALSE(packed());
  moe->experts->up[3].set_data(moe->experts->up[3].detach().clone());
  EXPECT_FALSE(packed());
  moe->experts->up[3].set_data(moe->experts->up[2].detach());
  EXPECT_FALSE(packed());
  // One of another dtype is nobody's to cast.
  moe->experts->up[3].set_data(before.to(at::kDouble));
  moe->to(at::Device(at::kCPU));
  EXPECT_EQ(moe->experts->up[3].scalar_type(), at::kDouble);
  EXPECT_EQ(moe->experts->up[2].scalar_type(), at::kBFloat16);
}

TEST(MoE, RoutesEveryTokenAndTrainsItsRouter) {
  torch::manual_seed(3);
  nn::MoE moe(nn::MoEOptions{.width = 16, .hidden = 8, .experts = 5, .top_k = 2});
  const at::Tensor x = at::randn({4, 7, 16}).requires_grad_();
  const nn::Routing routing = moe->router->forward(x.view({-1, 16}));
  EXPECT_EQ(routing.sizes.sum().item<int64_t>(), 4 * 7 * 2);
  expect_close(routing.weights.sum(-1), at::ones({28}), 1e-6);
  expect_close(nn::unpermute(nn::permute(x.view({-1, 16}), routing), routing), x.view({-1, 16}), 1e-6);

  // Token by token, with the weights of its experts.
  const at::Tensor y = moe->forward(x);
  at::Tensor wanted = at::zeros({28, 16});
  const at::Tensor chances = at::softmax(x.view({-1, 16}).mm(moe->router->weight.t()), -1);
  for (int64_t t = 0; t < 28; ++t) {
    auto [best, experts] = chances[t].topk(2);
    best = best / best.sum();
    for (int64_t k = 0; k < 2; ++k) {
      const int64_t e = experts[k].item<int64_t>();
      const auto h = at::mv(moe->experts->up[0][e], x.view({-1, 16})[t]).chunk(2);
      wanted[t] += best[k] * at::mv(moe->experts->down[0][e], at::silu(h[0]) * h[1]);
    }
  }
  expect_close(y.view({-1, 16}), wanted, 1e-5);
  y.pow(2).sum().backward();
  EXPECT_GT(moe->router->weight.grad().norm().item<double>(), 0.0);
}

// Each option of the whole is that of its experts: what is delayed is what comes without delay, when it is asked for.
TEST(MoE, HandsEveryOptionToItsExperts) {
  for (const nn::Experts kind : {nn::Experts::grouped, nn::Experts::separate}) {
    for (const nn::Activation activation : {nn::Activation::swiglu, nn::Activation::gelu}) {
      for (const bool bias : {false, true}) {
        const at::Tensor x = at::randn({9, 6});
        const auto gradients = [&](bool delayed) {
          torch::manual_seed(4);
          nn::MoE moe(nn::MoEOptions{.width = 6,
                                     .hidden = 5,
                                     .experts = 3,
                                     .top_k = 2,
                                     .activation = activation,
                                     .weights = kind,
                                     .bias = bias,
                                     .delay_wgrad_compute = delayed});
          EXPECT_EQ(moe->experts->up.size(), kind == nn::Experts::grouped ? 1U : 3U);
          EXPECT_EQ(moe->experts->up[0].size(-2), activation == nn::Activation::swiglu ? 10 : 5);
          EXPECT_EQ(moe->experts->up_biases.empty(), !bias);
          moe->forward(x).pow(2).sum().backward();
          EXPECT_EQ(moe->experts->up[0].grad().defined(), !delayed);
          EXPECT_EQ(moe->experts->down[0].grad().defined(), !delayed);
          if (delayed) {
            moe->backward_dw();
          } else {
            EXPECT_THROW(moe->backward_dw(), Error);
          }
          std::vector<at::Tensor> all;
          for (const at::Tensor& parameter : moe->parameters()) all.push_back(parameter.grad());
          return all;
        };
        const auto now = gradients(false), later = gradients(true);
        ASSERT_EQ(now.size(), later.size());
        for (size_t i = 0; i < now.size(); ++i) expect_close(later[i], now[i], 1e-6);
      }
    }
  }
}

}  // namespace
}  // namespace plumb::test

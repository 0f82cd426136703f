// The delivery table: every row, for every module, weight shape, beta, dtype and device.
#include "libtorch.h"

#include <chrono>
#include <future>

#include "nn/delivery.h"
#include "nn/support/fused.h"
#include "plumb/error.h"

namespace plumb::test {
namespace {

enum class Owner { none, plain, told };
enum class Beta { accumulate, overwrite };

struct Row {
  Kind kind;
  nn::Experts experts;
  Owner owner;
  bool delayed;
  Beta beta;
  at::Device device;
  at::ScalarType dtype;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const at::Device& device : devices()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Kind kind : {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp}) {
        for (const nn::Experts experts : {nn::Experts::grouped, nn::Experts::separate}) {
          if (kind == Kind::linear && experts == nn::Experts::separate) continue;
          for (const Owner owner : {Owner::none, Owner::plain, Owner::told}) {
            for (const bool delayed : {false, true}) {
              for (const Beta beta : {Beta::accumulate, Beta::overwrite}) {
                if (owner == Owner::none && beta == Beta::overwrite) continue;
                all.push_back({kind, experts, owner, delayed, beta, device, dtype});
              }
            }
          }
        }
      }
    }
  }
  return all;
}

std::string name_of(const testing::TestParamInfo<Row>& info) {
  const Row& r = info.param;
  const char* const kinds[] = {"Linear", "GroupedLinear", "GroupedMLP"};
  const char* const owners[] = {"NoBuffer", "Plain", "Told"};
  return std::string(kinds[static_cast<int>(r.kind)]) +
         (r.experts == nn::Experts::grouped ? "_OneWeight_" : "_EachItsWeight_") + owners[static_cast<int>(r.owner)] +
         (r.delayed ? "_Delayed" : "_Now") + (r.beta == Beta::accumulate ? "_Accumulate_" : "_Overwrite_") +
         (r.dtype == at::kFloat ? "f32" : "bf16") + (r.device.is_cuda() ? "_cuda" : "_cpu");
}

class DeliveryTable : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(All, DeliveryTable, testing::ValuesIn(rows()), name_of);

double tolerance(at::ScalarType dtype, bool into_f32) { return dtype == at::kFloat ? 2e-6 : into_f32 ? 6e-3 : 1e-2; }

TEST_P(DeliveryTable, GivesAutogradTheBufferAndTheHooksWhatTheRowSays) {
  const Row& row = GetParam();
  Subject subject(
      {.kind = row.kind, .experts = row.experts, .delayed = row.delayed, .device = row.device, .dtype = row.dtype});
  const bool fused = row.owner != Owner::none;
  std::vector<std::shared_ptr<MainGradSink>> sinks;
  std::vector<at::Tensor> before;
  std::vector<Watch> watches;
  std::vector<std::vector<at::Tensor>> hooked(subject.weights.size());
  for (size_t i = 0; i < subject.weights.size(); ++i) {
    const at::Tensor& weight = subject.weights[i];
    watches.emplace_back(weight);
    weight.register_hook([&hooked, &sinks, i, fused](const at::Tensor& gradient) {
      hooked[i].push_back(gradient);
      if (fused && gradient.defined()) {
        EXPECT_TRUE(sinks[i]->facts.grad_added_to_main_grad.value_or(false)) << "told before a hook could add it";
      }
    });
    if (!fused) continue;
    const at::Tensor buffer = at::randn(weight.sizes(), weight.options().dtype(at::kFloat).requires_grad(false));
    if (row.beta == Beta::overwrite) buffer.fill_(std::numeric_limits<float>::quiet_NaN());
    before.push_back(row.beta == Beta::overwrite ? at::zeros_like(buffer) : buffer.clone());
    MainGrad facts{.main_grad = buffer, .overwrite_main_grad = row.beta == Beta::overwrite};
    if (row.owner == Owner::told) facts.grad_added_to_main_grad = false;
    sinks.push_back(attach_main_grad(weight, facts, "w" + std::to_string(sinks.size())));
  }
  const auto wanted = subject.reference(subject.x, subject.dy);
  subject.forward(subject.x).backward(subject.dy);

  const size_t n = subject.weights.size();
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& weight = subject.weights[i];
    const Watch::Seen& seen = *watches[i].seen;
    ASSERT_EQ(seen.fired, 1) << "the accumulator's hooks fire in every row";
    const bool gradient = !fused && !row.delayed, stand_in = row.owner == Owner::told;
    ASSERT_EQ(seen.gradients[0].defined(), gradient);
    ASSERT_EQ(hooked[i].size() == 1 && hooked[i][0].defined(), gradient || stand_in) << "hooks on the gradient";
    if (gradient) expect_close(weight.grad(), wanted[i], tolerance(row.dtype, false));
    if (!fused) continue;
    EXPECT_EQ(sinks[i]->outstanding(), row.delayed ? 1 : 0);
    EXPECT_EQ(sinks[i]->facts.grad_added_to_main_grad.value_or(false), stand_in);
    if (stand_in) {
      EXPECT_EQ(hooked[i][0].count_nonzero().item<int64_t>(), 0) << "a stand-in that leaks must add nothing";
      EXPECT_EQ(hooked[i][0].sizes(), weight.sizes());
      EXPECT_EQ(hooked[i][0].storage().nbytes(), weight.element_size());
      EXPECT_FALSE(hooked[i][0].is_alias_of(sinks[i]->facts.main_grad));
    }
    EXPECT_FALSE(weight.grad().defined());
    if (row.delayed && row.beta == Beta::accumulate) {
      EXPECT_TRUE(at::equal(sinks[i]->facts.main_grad, before[i]));
    }
  }
  if (row.delayed) subject.backward_dw();
  for (size_t i = 0; i < n; ++i) {
    if (fused) {
      expect_close(f64(sinks[i]->facts.main_grad), wanted[i] + f64(before[i]), tolerance(row.dtype, true));
      EXPECT_EQ(sinks[i]->outstanding(), 0);
      EXPECT_EQ(sinks[i]->facts.grad_added_to_main_grad.value_or(false), row.owner == Owner::told);
      if (row.beta == Beta::overwrite && row.kind != Kind::linear) {
        const at::Tensor empty = row.experts == nn::Experts::grouped ? sinks[i]->facts.main_grad[1]
                                 : i % 5 == 1                        ? sinks[i]->facts.main_grad
                                                                     : at::Tensor();
        if (empty.defined()) {
          EXPECT_EQ(empty.count_nonzero().item<int64_t>(), 0) << "an expert without tokens: exact zeros";
        }
      }
    } else {
      expect_close(subject.weights[i].grad(), wanted[i], tolerance(row.dtype, false));
    }
    ASSERT_EQ(watches[i].seen->fired, 1);
  }
}

TEST(Decide, ReadsTheTableAndNothingElse) {
  using nn::Returned;
  using nn::When;
  const at::Tensor buffer = at::zeros({1});
  for (const When when : {When::now, When::delayed}) {
    at::NoGradGuard as_in_a_backward;
    nn::Weight none{.wanted = true};
    nn::Weight plain{.sink = std::make_shared<StepSink>(buffer), .wanted = true};
    nn::Weight told{.sink = std::make_shared<StepSink>(buffer, Tell::by_stand_in), .wanted = true};
    EXPECT_EQ(nn::decide(none, when).returned, when == When::now ? Returned::gradient : Returned::nothing);
    EXPECT_EQ(nn::decide(plain, when).returned, Returned::nothing);
    EXPECT_EQ(nn::decide(told, when).returned, Returned::stand_in);
    EXPECT_TRUE(nn::decide(told, when).into_buffer);
    EXPECT_EQ(nn::decide(told, when).when, when);
    told.demanded = true;
    EXPECT_EQ(nn::decide(told, when).returned, Returned::gradient);
    EXPECT_FALSE(nn::decide(told, when).into_buffer);
    EXPECT_EQ(nn::decide(told, when).when, When::now);
  }
}

// The four bad buffers, for each module: the error names the weight, and no buffer of the operation was touched.
TEST(BadBuffer, IsAnErrorThatNamesTheWeightBeforeAnyWrite) {
  for (const Kind kind : {Kind::linear, Kind::grouped_linear, Kind::grouped_mlp}) {
    for (const nn::Experts experts : {nn::Experts::grouped, nn::Experts::separate}) {
      if (kind == Kind::linear && experts == nn::Experts::separate) continue;
      Subject subject({.kind = kind, .experts = experts});
      const at::Tensor& last = subject.weights.back();
      const std::vector<std::pair<at::Tensor, std::string>> bad = {
          {at::zeros({3, 3}), "has shape"},
          {at::zeros(last.sizes(), at::kBFloat16), "is BFloat16"},
          {at::zeros(last.sizes(), at::kDouble), "is Double"},
          {at::zeros(last.sizes(), at::TensorOptions(at::kMeta)), "is on meta"},
          {at::zeros(last.transpose(-1, -2).sizes()).transpose(-1, -2), "is not contiguous"},
          {at::Tensor(), "is missing"},
      };
      for (const auto& [buffer, what] : bad) {
        std::vector<std::shared_ptr<MainGradSink>> sinks;
        for (const at::Tensor& weight : subject.weights) {
          sinks.push_back(attach_main_grad(weight, {.main_grad = at::ones_like(weight)}, "a.weight"));
        }
        sinks.back()->facts.main_grad = buffer;
        try {
          subject.forward(subject.x).backward(subject.dy);
          ADD_FAILURE() << "no error: " << what;
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("'a.weight' " + what)));
        }
        // The layers of an mlp are two operations; within the one that failed, nothing was written.
        const size_t first = kind == Kind::grouped_mlp ? sinks.size() / 2 : 0;
        for (size_t i = first; i + 1 < sinks.size(); ++i) {
          EXPECT_TRUE(at::equal(sinks[i]->facts.main_grad, at::ones_like(subject.weights[i])));
        }
      }
    }
  }
}

TEST(Registry, ForgetsASinkWithItsOwnerAndAParameterWithItself) {
  at::Tensor weight = at::zeros({2, 2}).requires_grad_();
  auto sink = attach_main_grad(weight, {.main_grad = at::zeros({2, 2})});
  EXPECT_EQ(sink_of(weight), sink);
  sink.reset();
  EXPECT_EQ(sink_of(weight), nullptr);
  sink = attach_main_grad(weight, {.main_grad = at::zeros({2, 2})});
  attach(weight, nullptr);
  EXPECT_EQ(sink_of(weight), nullptr);
  attach(weight, sink);
  for (int i = 0; i < 300; ++i) {
    weight = at::zeros({2, 2}).requires_grad_();
    ASSERT_EQ(sink_of(weight), nullptr) << "a new parameter at an old one's address";
    attach(weight, sink);
  }
  EXPECT_THROW(attach(weight * 2, sink), Error);
}

// One module that two threads walk backwards, while one of them makes up for what was put off: each contribution is made once.
TEST(Delayed, WhatComesWhileOthersAreMadeWaitsForThem) {
  struct Watched final : StepSink {
    using StepSink::StepSink;
    GradTarget open() override {
      if (opened) std::exchange(opened, {})();
      return StepSink::open();
    }
    void put_off() override {
      StepSink::put_off();
      if (outstanding > 1) coming.set_value();
    }
    std::function<void()> opened;
    std::promise<void> coming;
  };
  const Subject subject({.kind = Kind::linear, .delayed = true});
  const auto sink = std::make_shared<Watched>(at::zeros_like(subject.weights[0]));
  attach(subject.weights[0], sink);
  const auto wanted = subject.reference(subject.x, subject.dy);
  subject.forward(subject.x).backward(subject.dy);
  const at::Tensor x = subject.x.detach().clone(), y = subject.forward(x);
  std::future<void> other;
  bool between = false;
  sink->opened = [&] {  // in the midst of the first
    other = std::async(std::launch::async, [&] { y.backward(subject.dy); });
    sink->coming.get_future().wait();
    // In vain, but for who is not held back.
    between = other.wait_for(std::chrono::milliseconds(200)) == std::future_status::ready;
  };
  subject.backward_dw();
  other.get();
  EXPECT_FALSE(between) << "the list of what was put off grew while it was worked off";
  expect_close(sink->buffer, wanted[0], 5e-6);
  EXPECT_EQ(sink->outstanding, 1);
  subject.backward_dw();
  expect_close(sink->buffer, wanted[0] * 2, 5e-6);
  EXPECT_EQ(sink->outstanding, 0);
}

}  // namespace
}  // namespace plumb::test

// Gradients past autograd: handed over by a node only where nobody else listens to the leaf, and written by operations into the
// sink that was attached last.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "engine/impl.h"
#include "plumb/fused.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::autograd::variable_list;

struct Listens final : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& gradients) override { return gradients; }
};
struct ListensAfter final : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& outputs, const variable_list&) override { return outputs; }
};
struct ListensAtLast final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

// Who else listens to the leaf decides; whoever does hears of every gradient.
TEST(HandOver, IsRefusedWhereSomebodyElseListens) {
  enum class Who { nobody, leaf, before, after, at_last, frozen, another_accumulator, ended };
  using enum Who;
  for (const Who who : {nobody, leaf, before, after, at_last, frozen, another_accumulator, ended}) {
    at::Tensor a = at::zeros({3}).requires_grad_(), other = at::zeros({3}).requires_grad_(), still = at::zeros({2});
    {
      const Engine first(World(), NamedTensors{{"a", a}}, {}, SGD{.lr = 1});  // leaves nothing behind that listens
    }
    auto engine =
        std::make_unique<Engine>(World(), NamedTensors{{"a", a}, {"still", still}}, NamedTensors{}, SGD{.lr = 1});
    const std::shared_ptr<Reducer> reducer = engine->impl().reducer;
    const auto node = torch::autograd::impl::grad_accumulator(a);
    const auto stranger = torch::autograd::impl::grad_accumulator(other);
    if (who == leaf) a.register_hook([](const at::Tensor& gradient) { return gradient * 1; });
    if (who == before) node->add_pre_hook(std::make_unique<Listens>());
    if (who == after) node->add_post_hook(std::make_unique<ListensAfter>());
    if (who == at_last) torch::autograd::impl::set_post_acc_grad_hooks(a, std::make_unique<ListensAtLast>());
    if (who == frozen) a.set_requires_grad(false);
    if (who == ended) engine.reset();
    const bool taken = reducer->hand_over(a, who == another_accumulator ? *stranger : *node, at::full({3}, 2.0));
    EXPECT_EQ(taken, who == nobody) << static_cast<int>(who);
    if (taken) {
      engine->end_pass();
      EXPECT_TRUE(a.grad().eq(2).all().item<bool>());
      engine->step();
      EXPECT_TRUE(a.detach().eq(-2).all().item<bool>());
      EXPECT_FALSE(reducer->hand_over(still, *node, at::ones({2}))) << "nobody trains it";
    } else {
      EXPECT_FALSE(a.grad().defined()) << static_cast<int>(who);
    }
    if (who == at_last) torch::autograd::impl::set_post_acc_grad_hooks(a, nullptr);
  }
}

// Its own hook goes with an engine, and those of others stay.
TEST(HandOver, AnEngineThatEndsTakesItsHookAlong) {
  at::Tensor a = at::zeros({3}).requires_grad_();
  a.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
  const size_t before = torch::autograd::impl::hooks(a).size();
  for (int i = 0; i < 3; ++i) {
    Engine engine(World(), NamedTensors{{"a", a}}, {}, SGD{.lr = 1});
    EXPECT_EQ(torch::autograd::impl::hooks(a).size(), before + 1);
    a.sum().backward();
    EXPECT_TRUE(a.grad().eq(3).all().item<bool>());
    EXPECT_EQ(torch::autograd::impl::hooks(a).size(), before + 1);
    a.mutable_grad().reset();
  }
  EXPECT_EQ(torch::autograd::impl::hooks(a).size(), before);
}

struct Counting final : FusedSink {
  GradTarget open() override { return {buffer, false}; }
  void wrote() override { ++writes; }
  at::Tensor buffer = at::zeros({3});
  int writes = 0;
};

TEST(AttachedSinks, AreTheLastOnesAndGoWithTheirOwnersAndParameters) {
  const at::Tensor a = at::zeros({3}).requires_grad_(), b = at::zeros({3}).requires_grad_();
  EXPECT_EQ(sink_of(a), nullptr);
  EXPECT_EQ(sink_of(at::Tensor()), nullptr);
  auto first = std::make_shared<Counting>(), second = std::make_shared<Counting>();
  attach(a, first);
  attach(b, second);
  EXPECT_EQ(sink_of(a), first);
  EXPECT_EQ(sink_of(b), second);
  attach(a, second);
  EXPECT_EQ(sink_of(a), second) << "a later one replaces it";
  attach(a, nullptr);
  EXPECT_EQ(sink_of(a), nullptr);
  EXPECT_EQ(sink_of(b), second) << "the other's stays";
  EXPECT_EQ(second.use_count(), 1) << "held weakly";
  second.reset();
  EXPECT_EQ(sink_of(b), nullptr) << "without its owner there is none";
  EXPECT_THAT([&] { attach(at::Tensor(), first); }, ThrowsMessage<Error>(HasSubstr("no parameter")));
  EXPECT_THAT([&] { attach(a * 2, first); }, ThrowsMessage<Error>(HasSubstr("the parameter itself")));
  // Many come and go; those that are alive stay known.
  std::vector<std::pair<at::Tensor, std::shared_ptr<Counting>>> kept;
  for (int i = 0; i < 1000; ++i) {
    const at::Tensor p = at::zeros({1}).requires_grad_();
    const auto sink = std::make_shared<Counting>();
    attach(p, sink);
    if (i % 7 == 0) kept.emplace_back(p, sink);
  }
  for (const auto& [p, sink] : kept) EXPECT_EQ(sink_of(p), sink);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(sink_of(at::zeros({1}).requires_grad_()), nullptr);
}

TEST(AttachedSinks, OfMegatronsConventionSayWhatItsAttributesSay) {
  const at::Tensor a = at::zeros({2, 3}).requires_grad_(), buffer = at::ones({2, 3});
  for (const bool overwrites : {false, true}) {
    for (const std::optional<bool> told : {std::optional<bool>(), std::optional(false), std::optional(true)}) {
      const auto sink = attach_main_grad(
          a, {.main_grad = buffer, .overwrite_main_grad = overwrites, .grad_added_to_main_grad = told}, "w");
      EXPECT_EQ(sink_of(a), sink);
      EXPECT_EQ(sink->name(), "w");
      const GradTarget target = sink->open();
      EXPECT_TRUE(target.buffer.is_same(buffer));
      EXPECT_EQ(target.accumulate, !overwrites);
      sink->wrote();
      EXPECT_EQ(sink->tell(), told ? Tell::by_stand_in : Tell::nothing);
      EXPECT_EQ(sink->facts.grad_added_to_main_grad, told) << "a write alone tells nobody";
      sink->stood_in();
      EXPECT_EQ(sink->facts.grad_added_to_main_grad, told ? std::optional(true) : std::nullopt);
      EXPECT_EQ(sink->outstanding(), 0);
      sink->put_off();
      sink->put_off();
      EXPECT_EQ(sink->outstanding(), 2);
      sink->made_up();
      EXPECT_EQ(sink->outstanding(), 1);
    }
  }
  EXPECT_EQ(sink_of(a), nullptr) << "their owners have gone";
}

}  // namespace
}  // namespace plumb

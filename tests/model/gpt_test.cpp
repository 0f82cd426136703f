// The GPT is causal, and its initial values are a function of size and seed alone.
#include "model/gpt.h"

#include <gtest/gtest.h>
#include "libtorch.h"

#include <map>

#include "plumb/error.h"

namespace plumb::model {

namespace {

constexpr GptSize kSmall{.layers = 2, .heads = 2, .width = 16, .context = 8, .vocabulary = 11};

GptSize with_experts(GptSize size, int64_t experts) {
  size.experts = experts;
  return size;
}

TEST(Gpt, ItsExpertsHandOverGradientsInTheDtypeThatIsAskedFor) {
  Gpt model(GptSize{.layers = 1, .heads = 1, .width = 8, .context = 4, .vocabulary = 5, .experts = 2, .top_k = 1}, 3);
  model->to(at::kBFloat16);
  model->sum_experts_in(at::kFloat);
  model(at::zeros({1, 4}, at::kLong)).sum().backward();
  int experts = 0;
  for (const auto& item : model->named_parameters()) {
    const bool expert = item.key().find(".experts.") != std::string::npos;
    experts += expert ? 1 : 0;
    if (!item.value().grad().defined()) continue;
    EXPECT_EQ(item.value().grad().scalar_type(), expert ? at::kFloat : at::kBFloat16) << item.key();
  }
  EXPECT_GT(experts, 0);
}

TEST(Gpt, StartsFromTheSeedWhateverTheGlobalGeneratorDid) {
  torch::manual_seed(1);
  Gpt a(kSmall, 7);
  torch::manual_seed(2);
  Gpt b(kSmall, 7), c(kSmall, 8);
  const auto pa = a->parameters(), pb = b->parameters(), pc = c->parameters();
  bool differs = false;
  for (size_t i = 0; i < pa.size(); ++i) {
    EXPECT_TRUE(at::equal(pa[i], pb[i]));
    differs |= !at::equal(pa[i], pc[i]);
  }
  EXPECT_TRUE(differs);
}

TEST(Gpt, SeesNoLaterToken) {
  torch::NoGradGuard no_grad;
  Gpt gpt(kSmall, 7);
  auto tokens = at::arange(8, at::kLong).remainder(11).unsqueeze(0);
  const auto before = gpt->forward(tokens);
  tokens[0][5] = 9;
  const auto after = gpt->forward(tokens);
  EXPECT_TRUE(at::allclose(before.narrow(1, 0, 5), after.narrow(1, 0, 5)));
  EXPECT_FALSE(at::allclose(before.narrow(1, 5, 3), after.narrow(1, 5, 3)));
}

TEST(Gpt, TakesAMixtureOfExpertsAndReachesEveryParameterOfIt) {
  GptSize size = kSmall;
  size.experts = 3;
  Gpt gpt(size, 7);
  const auto tokens = at::arange(16, at::kLong).remainder(11).view({2, 8});
  gpt->forward(tokens).square().sum().backward();
  for (const auto& item : gpt->named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
  EXPECT_EQ(gpt->named_parameters()["blocks.0.moe.experts.up"].sizes(), at::IntArrayRef({3, 64, 16}));
}

TEST(Gpt, ReachesEveryParameter) {
  Gpt gpt(kSmall, 7);
  gpt->forward(at::ones({2, 8}, at::kLong)).square().sum().backward();
  for (const auto& item : gpt->named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
}

TEST(Gpt, KnowsItsShapeWithoutBeingMade) {
  for (const GptSize& size : {kSmall, with_experts(kSmall, 3), GptSize{1, 1, 4, 2, 100}, GptSize{1, 1, 4, 90, 5}}) {
    SCOPED_TRACE(c10::str(size.experts, " experts, ", size.vocabulary, " tokens"));
    Gpt gpt(size, 7);
    const ModelShape shape = shape_of(size);
    int64_t params = 0, largest = 0;
    std::map<std::string, int64_t> by_unit;
    for (const auto& item : gpt->named_parameters()) {
      params += item.value().numel();
      largest = std::max(largest, item.value().numel());
      const std::string& name = item.key();
      const size_t end = name.rfind("blocks.", 0) == 0 ? name.find('.', 7) : name.find('.');
      by_unit[name.substr(0, end)] += item.value().numel();
    }
    EXPECT_EQ(shape.params(), params);
    EXPECT_EQ(shape.largest, largest);
    std::vector<int64_t> units;
    for (int64_t i = 0; i < size.layers; ++i) units.push_back(by_unit["blocks." + std::to_string(i)]);
    units.insert(units.end(), {by_unit["tokens"], by_unit["head"]});
    EXPECT_EQ(shape.units, units);
    EXPECT_EQ(shape.others, by_unit["positions"] + by_unit["norm"]);
  }
}

// What is added to the residual stream starts smaller, by the number of times that something is.
TEST(Gpt, StartsAsTheDepthAsks) {
  for (const int64_t experts : {0, 2}) {
    Gpt gpt(GptSize{.layers = 8, .heads = 1, .width = 64, .context = 8, .vocabulary = 64, .experts = experts}, 7);
    for (const auto& item : gpt->named_parameters()) {
      const std::string& name = item.key();
      const at::Tensor& p = item.value();
      if (p.dim() == 1) {
        EXPECT_TRUE(p.eq(name.ends_with(".bias") ? 0 : 1).all().item<bool>()) << name;
        continue;
      }
      const bool added =
          name.ends_with("out.weight") || name.ends_with("down.weight") || name.ends_with("experts.down");
      // Four times the deviation of an estimate from so many.
      const double expected = added ? 0.02 / 4 : 0.02, error = 4 / std::sqrt(2.0 * static_cast<double>(p.numel()));
      EXPECT_NEAR(p.std().item<double>() / expected, 1, error) << name;
    }
  }
}

TEST(Gpt, RefusesAWidthThatItsHeadsDoNotDivide) {
  GptSize size = kSmall;
  size.heads = 3;
  EXPECT_THROW(Gpt(size, 7), Error);
}

}  // namespace

}  // namespace plumb::model

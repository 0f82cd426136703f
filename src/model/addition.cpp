// Sums made on the fly, and the exam on sums never seen.
#include "model/addition.h"

#include <torch/torch.h>

namespace plumb::model {

namespace {

constexpr int64_t kPlus = 10, kEquals = 11;

}  // namespace

Addition::Addition(int64_t digits, uint64_t seed) : digits_(digits), limit_(1), seed_(seed) {
  for (int64_t i = 0; i < digits; ++i) limit_ *= 10;
}

std::string Addition::name() const { return "addition of " + std::to_string(digits_) + "-digit numbers"; }

bool Addition::is_held_out(int64_t a, int64_t b) {
  return mix(0, static_cast<uint64_t>(std::min(a, b)), static_cast<uint64_t>(std::max(a, b)), 0) % 10 == 0;
}

std::pair<int64_t, int64_t> Addition::draw(uint64_t stream, uint64_t step, uint64_t i, bool held_out) const {
  for (uint64_t attempt = 0;; ++attempt) {
    const uint64_t bits = mix(seed_ ^ (stream << 60), step, i, attempt);
    const auto a = static_cast<int64_t>((bits >> 32) % static_cast<uint64_t>(limit_));
    const auto b = static_cast<int64_t>((bits & 0xffffffff) % static_cast<uint64_t>(limit_));
    if (is_held_out(a, b) == held_out) return {a, b};
  }
}

std::pair<int64_t, int64_t> Addition::training_pair(int64_t step, int64_t i) const {
  return draw(0, static_cast<uint64_t>(step), static_cast<uint64_t>(i), false);
}

std::pair<int64_t, int64_t> Addition::held_out_pair(int64_t i) const {
  return draw(1, 0, static_cast<uint64_t>(i), true);
}

at::Tensor Addition::questions(const std::vector<std::pair<int64_t, int64_t>>& pairs) const {
  auto tokens = at::empty({static_cast<int64_t>(pairs.size()), 2 * digits_ + 2}, at::kLong);
  auto* out = tokens.data_ptr<int64_t>();
  const auto number = [&](int64_t value) {
    for (int64_t power = limit_ / 10; power > 0; power /= 10) *out++ = value / power % 10;
  };
  for (const auto& [a, b] : pairs) {
    number(a);
    *out++ = kPlus;
    number(b);
    *out++ = kEquals;
  }
  return tokens;
}

at::Tensor Addition::answers(const std::vector<std::pair<int64_t, int64_t>>& pairs) const {
  auto tokens = at::empty({static_cast<int64_t>(pairs.size()), digits_ + 1}, at::kLong);
  auto* out = tokens.data_ptr<int64_t>();
  for (const auto& [a, b] : pairs) {
    int64_t sum = a + b;
    for (int64_t i = 0; i <= digits_; ++i, sum /= 10) *out++ = sum % 10;
  }
  return tokens;
}

Batch Addition::batch(int64_t step, int64_t first, int64_t count) const {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t i = first; i < first + count; ++i) pairs.push_back(training_pair(step, i));
  const auto answer = answers(pairs);
  return {at::cat({questions(pairs), answer.narrow(1, 0, digits_)}, 1), answer};
}

Score Addition::evaluate(Gpt& model, int64_t first, int64_t count, int64_t samples) const {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t i = first; i < first + count; ++i) pairs.push_back(held_out_pair(i));
  const auto device = model->parameters().at(0).device();
  const auto said = decode(model, questions(pairs).to(device), digits_ + 1).cpu().contiguous();
  const auto right = (said == answers(pairs)).all(1);
  Score score{.asked = count, .right = right.sum().item<int64_t>(), .samples = {}};
  for (int64_t i = 0; i < std::min(count, samples); ++i) {
    int64_t value = 0;
    std::string odd;  // a plus or an equals sign where a digit should be
    for (int64_t d = digits_; d >= 0; --d) {
      const int64_t token = said[i][d].item<int64_t>();
      odd += token == kPlus ? '+' : token == kEquals ? '=' : static_cast<char>('0' + token);
      value = 10 * value + token;
    }
    const auto [a, b] = pairs[i];
    score.samples.push_back({.prompt = std::to_string(a) + " + " + std::to_string(b) + " =",
                             .output = odd.find_first_of("+=") == std::string::npos ? std::to_string(value) : odd,
                             .expected = std::to_string(a + b),
                             .right = right[i].item<bool>()});
  }
  return score;
}

}  // namespace plumb::model

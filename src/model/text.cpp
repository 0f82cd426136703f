// Windows over a file.
#include "model/text.h"

#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "plumb/error.h"

namespace plumb::model {

Text::Text(const std::string& path, int64_t context, uint64_t seed) : path_(path), context_(context), seed_(seed) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) throw Error("data file '" + path + "' does not exist");
  if (fs::is_directory(path, ignored)) throw Error("data file '" + path + "' is a folder; name a text file");
  if (!fs::is_regular_file(path, ignored)) {
    throw Error("data file '" + path + "' is no regular file (a pipe, a socket or a device); name a text file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("data file '" + path + "' cannot be read");
  bytes_.assign(std::istreambuf_iterator<char>(file), {});
  if (bytes_.empty()) throw Error("data file '" + path + "' is empty");
  const size_t zero = bytes_.find('\0');
  if (zero != std::string::npos) {
    throw Error("data file '" + path + "' is not text: byte " + std::to_string(zero) + " is zero");
  }
  const auto size = static_cast<int64_t>(bytes_.size());
  train_ = size - std::max(size / 10, context + 1);
  if (train_ < context + 1) {
    throw Error("data file '" + path + "' has " + std::to_string(size) + " bytes; --context " +
                std::to_string(context) + " needs at least " + std::to_string(2 * (context + 1)));
  }
}

Batch Text::windows(const std::vector<int64_t>& starts) const {
  const auto count = static_cast<int64_t>(starts.size());
  auto tokens = at::empty({count, context_ + 1}, at::kLong);
  auto* out = tokens.data_ptr<int64_t>();
  for (const int64_t start : starts) {
    for (int64_t i = 0; i <= context_; ++i) *out++ = static_cast<unsigned char>(bytes_[start + i]);
  }
  return {tokens.narrow(1, 0, context_), tokens.narrow(1, 1, context_).contiguous()};
}

Batch Text::batch(int64_t step, int64_t first, int64_t count) const {
  std::vector<int64_t> starts;
  const auto choices = static_cast<uint64_t>(train_ - context_);
  for (int64_t i = first; i < first + count; ++i) {
    starts.push_back(
        static_cast<int64_t>(mix(seed_, static_cast<uint64_t>(step), static_cast<uint64_t>(i), 0) % choices));
  }
  return windows(starts);
}

Score Text::evaluate(Gpt& model, int64_t first, int64_t count, int64_t samples) const {
  torch::NoGradGuard no_grad;
  const auto choices = static_cast<uint64_t>(static_cast<int64_t>(bytes_.size()) - train_ - context_);
  std::vector<int64_t> starts;
  for (int64_t i = first; i < first + count; ++i) {
    starts.push_back(train_ + static_cast<int64_t>(mix(seed_, ~uint64_t{0}, static_cast<uint64_t>(i), 1) % choices));
  }
  const auto device = model->parameters().at(0).device();
  const Batch asked = windows(starts);
  Score score;
  constexpr int64_t kRows = 64;  // bounds the memory of the logits
  for (int64_t row = 0; row < count; row += kRows) {
    const int64_t rows = std::min(kRows, count - row);
    const auto said = model->forward(asked.input.narrow(0, row, rows).to(device)).argmax(-1).cpu();
    score.right += (said == asked.target.narrow(0, row, rows)).sum().item<int64_t>();
  }
  score.asked = asked.target.numel();
  const int64_t shown = std::min(samples, count);
  if (shown == 0) return score;

  const int64_t prompt = std::max<int64_t>(1, context_ / 2);
  constexpr int64_t kLength = 60;
  const auto said = decode(model, asked.input.narrow(0, 0, shown).narrow(1, 0, prompt).to(device), kLength).cpu();
  for (int64_t i = 0; i < shown; ++i) {
    std::string output;
    for (int64_t j = 0; j < kLength; ++j) output += static_cast<char>(said[i][j].item<int64_t>());
    const auto start = static_cast<size_t>(starts[i]);
    Sample sample{
        .prompt = bytes_.substr(start, prompt), .output = output, .expected = bytes_.substr(start + prompt, kLength)};
    sample.right = sample.output == sample.expected;
    score.samples.push_back(sample);
  }
  return score;
}

}  // namespace plumb::model

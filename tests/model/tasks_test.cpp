// Tasks by plain re-computation: which bytes and sums a sample is made of, what is held out, and how answers are counted.
#include "model/task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include "libtorch.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "model/addition.h"
#include "model/text.h"

namespace plumb::model {

namespace {

// A file whose bytes tell where they stand: every two neighbours are another pair.
class File {
 public:
  explicit File(int64_t size)
      : path_(std::filesystem::temp_directory_path() / ("plumb-text-" + std::to_string(getpid()))) {
    for (int64_t i = 0; static_cast<int64_t>(bytes.size()) < size; ++i) {
      bytes += static_cast<char>(1 + i % 250);
      bytes += static_cast<char>(1 + i / 250);
    }
    bytes.resize(static_cast<size_t>(size));
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }
  // Where these bytes stand; -1: nowhere.
  int64_t place(const at::Tensor& tokens) const {
    std::string text;
    for (int64_t i = 0; i < tokens.numel(); ++i) text += static_cast<char>(tokens[i].item<int64_t>());
    const size_t at = bytes.find(text);
    return at == std::string::npos ? -1 : static_cast<int64_t>(at);
  }

  std::string bytes;

 private:
  std::filesystem::path path_;
};

std::string told(const at::Tensor& tokens) {
  std::string text;
  for (int64_t i = 0; i < tokens.numel(); ++i) text += static_cast<char>(tokens[i].item<int64_t>());
  return text;
}

// The most likely next tokens, one window at a time.
at::Tensor plain_decode(Gpt& model, at::Tensor row, int64_t count) {
  torch::NoGradGuard no_grad;
  std::vector<at::Tensor> said;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t seen = std::min(row.size(0), model->size().context);
    const at::Tensor next =
        model->forward(row.narrow(0, row.size(0) - seen, seen).unsqueeze(0))[0][-1].argmax().view({1});
    said.push_back(next);
    row = at::cat({row, next});
  }
  return at::cat(said);
}

TEST(Text, TrainsOnWindowsBeforeTheHeldOutPartAndAsksThoseInIt) {
  for (const auto& [size, context] : {std::pair<int64_t, int64_t>{2000, 8}, {201, 8}, {18, 8}, {1000, 200}}) {
    SCOPED_TRACE(std::to_string(size) + " bytes in windows of " + std::to_string(context));
    const File file(size);
    const Text text(file.path(), context, 5);
    const int64_t held_out = std::max(size / 10, context + 1), trained = size - held_out;
    std::set<int64_t> begins;
    for (const int64_t step : {0, 1, 40}) {
      const Batch batch = text.batch(step, 3, 100);
      ASSERT_EQ(batch.input.sizes(), at::IntArrayRef({100, context}));
      for (int64_t i = 0; i < 100; ++i) {
        const at::Tensor window = at::cat({batch.input[i], batch.target[i].narrow(0, context - 1, 1)});
        const int64_t begin = file.place(window);
        ASSERT_GE(begin, 0);
        EXPECT_LE(begin + context + 1, trained);
        EXPECT_TRUE(at::equal(batch.input[i].narrow(0, 1, context - 1), batch.target[i].narrow(0, 0, context - 1)));
        begins.insert(begin);
      }
      // Any number of ranks sees the same batch.
      EXPECT_TRUE(at::equal(text.batch(step, 50, 20).input, batch.input.narrow(0, 47, 20)));
    }
    EXPECT_GE(*begins.rbegin(), (trained - context) * 3 / 4) << "all of it is trained on";
    EXPECT_EQ(trained > 3 * context, !at::equal(text.batch(0, 0, 9).input, text.batch(1, 0, 9).input));
    EXPECT_EQ(trained > 3 * context,
              !at::equal(text.batch(0, 0, 9).input, Text(file.path(), context, 6).batch(0, 0, 9).input));
  }
}

TEST(Text, CountsEveryByteThatIsGuessed) {
  const File file(1200);
  constexpr int64_t context = 12;
  const Text text(file.path(), context, 5);
  Gpt model(GptSize{.layers = 1, .heads = 2, .width = 8, .context = context, .vocabulary = 256}, 3);
  {  // a model that knows which byte follows which in the second half, so that some are right
    torch::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) item.value().mul_(20);
  }
  const int64_t trained = 1200 - 120;
  for (const int64_t count : {1, 63, 64, 65, 130}) {
    SCOPED_TRACE(count);
    const Score all = text.evaluate(model, 0, count, 3);
    EXPECT_EQ(all.asked, count * context);
    // In parts it is the same.
    const int64_t half = count / 2;
    int64_t right = text.evaluate(model, half, count - half, 0).right;
    if (half > 0) right += text.evaluate(model, 0, half, 0).right;
    EXPECT_EQ(all.right, right);
    EXPECT_EQ(all.samples.size(), static_cast<size_t>(std::min<int64_t>(3, count)));
    for (const Sample& sample : all.samples) {
      const size_t begin = file.bytes.find(sample.prompt + sample.expected);
      ASSERT_NE(begin, std::string::npos);
      EXPECT_GE(static_cast<int64_t>(begin), trained) << "a question that was trained on";
      EXPECT_EQ(sample.prompt.size(), static_cast<size_t>(context / 2));
      const at::Tensor prompt = at::empty({context / 2}, at::kLong);
      for (int64_t i = 0; i < context / 2; ++i)
        prompt[i] = static_cast<unsigned char>(sample.prompt[static_cast<size_t>(i)]);
      EXPECT_EQ(sample.output, told(plain_decode(model, prompt, 60)));
      EXPECT_EQ(sample.right, sample.output == sample.expected);
    }
  }
}

TEST(Addition, CountsTheSumsThatAreSaid) {
  constexpr int64_t digits = 2;
  const Addition task(digits, 9);
  int64_t odd = 0, numbers = 0;
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    SCOPED_TRACE(seed);
    Gpt model(GptSize{.layers = 1, .heads = 1, .width = 8, .context = 3 * digits + 2, .vocabulary = 12}, seed);
    {
      torch::NoGradGuard no_grad;
      for (auto& item : model->named_parameters()) item.value().mul_(30);
    }
    const Score score = task.evaluate(model, 5, 40, 40);
    EXPECT_EQ(score.asked, 40);
    int64_t right = 0;
    for (int64_t i = 0; i < 40; ++i) {
      const auto [a, b] = task.held_out_pair(5 + i);
      const Sample& sample = score.samples.at(static_cast<size_t>(i));
      EXPECT_EQ(sample.prompt, std::to_string(a) + " + " + std::to_string(b) + " =");
      EXPECT_EQ(sample.expected, std::to_string(a + b));
      const at::Tensor said =
          plain_decode(model, at::tensor({a / 10, a % 10, int64_t{10}, b / 10, b % 10, int64_t{11}}), 3);
      int64_t value = 0;
      std::string highest_first;
      for (int64_t d = 2; d >= 0; --d) {
        const auto token = said[d].item<int64_t>();
        highest_first += "0123456789+="[token];
        value = 10 * value + token;
      }
      const bool number = highest_first.find_first_of("+=") == std::string::npos;
      EXPECT_EQ(sample.output, number ? std::to_string(value) : highest_first);
      EXPECT_EQ(sample.right, number && value == a + b) << sample.prompt << sample.output;
      right += sample.right ? 1 : 0;
      ++(number ? numbers : odd);
    }
    EXPECT_EQ(score.right, right);
  }
  EXPECT_GT(numbers, 0);
  EXPECT_GT(odd, 0) << "none said a plus where a digit should be";
}

// The exam is no lesson: pairs of both are drawn apart, and another seed draws others.
TEST(Addition, DrawsEveryPairOfItsOwn) {
  const Addition task(9, 1), other(9, 2);
  std::set<std::pair<int64_t, int64_t>> all;
  for (int64_t i = 0; i < 200; ++i) {
    all.insert({task.training_pair(0, i), task.training_pair(1, i), other.training_pair(0, i), task.held_out_pair(i),
                other.held_out_pair(i)});
  }
  EXPECT_EQ(all.size(), 1000u);
}

}  // namespace

}  // namespace plumb::model

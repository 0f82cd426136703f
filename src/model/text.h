// The bytes of a text file: the model guesses the next one. The last tenth of the file is held out.
#pragma once

#include "model/task.h"

namespace plumb::model {

class Text : public Task {
 public:
  // Throws plumb::Error for a file that is missing, empty, not text, or too short for `context`.
  Text(const std::string& path, int64_t context, uint64_t seed);

  std::string name() const override { return "bytes of " + path_; }
  std::string held_out() const override { return "held-out bytes"; }
  int64_t vocabulary() const override { return 256; }
  int64_t length() const override { return context_; }
  Batch batch(int64_t step, int64_t first, int64_t count) const override;
  // Each question is one window of the held-out part; every byte of it is asked, given the true ones before it.
  Score evaluate(Gpt& model, int64_t first, int64_t count, int64_t samples) const override;

 private:
  Batch windows(const std::vector<int64_t>& starts) const;

  std::string path_;
  int64_t context_;
  uint64_t seed_;
  std::string bytes_;
  int64_t train_ = 0;  // bytes [0, train_) are trained on, the rest are held out
};

}  // namespace plumb::model

// Integer addition as a language: "123+456=" and then the sum, lowest digit first, so that carries come before they
// are needed.
#pragma once

#include <utility>

#include "model/task.h"

namespace plumb::model {

class Addition : public Task {
 public:
  Addition(int64_t digits, uint64_t seed);

  std::string name() const override;
  std::string held_out() const override { return "held-out sums"; }
  int64_t vocabulary() const override { return 12; }  // ten digits, plus, equals
  int64_t length() const override { return 3 * digits_ + 2; }
  Batch batch(int64_t step, int64_t first, int64_t count) const override;
  Score evaluate(Gpt& model, int64_t first, int64_t count, int64_t samples) const override;

  // One tenth of all pairs, whichever way round, is never trained on. The split does not depend on the seed.
  static bool is_held_out(int64_t a, int64_t b);

  // The pair of sample `i` of `step`.
  std::pair<int64_t, int64_t> training_pair(int64_t step, int64_t i) const;
  std::pair<int64_t, int64_t> held_out_pair(int64_t i) const;

 private:
  std::pair<int64_t, int64_t> draw(uint64_t stream, uint64_t step, uint64_t i, bool held_out) const;
  at::Tensor questions(const std::vector<std::pair<int64_t, int64_t>>& pairs) const;
  at::Tensor answers(const std::vector<std::pair<int64_t, int64_t>>& pairs) const;

  int64_t digits_;
  int64_t limit_;  // 10^digits
  uint64_t seed_;
};

}  // namespace plumb::model

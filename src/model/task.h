// What the program learns: where samples come from, and how well the model does on samples it never saw.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/gpt.h"

namespace plumb::model {

struct Batch {
  at::Tensor input;   // int64 [samples, length]
  at::Tensor target;  // int64 [samples, counted]: what the last `counted` positions should say
};

struct Sample {
  std::string prompt, output, expected;
  bool right = false;
};

// One rank's share of an evaluation. Accuracy is right / asked over all ranks.
struct Score {
  int64_t asked = 0;
  int64_t right = 0;
  std::vector<Sample> samples;
};

class Task {
 public:
  virtual ~Task() = default;

  virtual std::string name() const = 0;      // "addition of 3-digit numbers"
  virtual std::string held_out() const = 0;  // what accuracy counts: "held-out sums"
  virtual int64_t vocabulary() const = 0;
  virtual int64_t length() const = 0;  // tokens the model reads per sample

  // Samples [first, first + count) of the global batch of `step`: a pure function of the seed, the step and the
  // sample's number, so that any number of ranks sees the same batch. Every sample counts the same number of tokens.
  virtual Batch batch(int64_t step, int64_t first, int64_t count) const = 0;

  // Asks the model questions [first, first + count) of the held-out ones, by greedy decoding.
  virtual Score evaluate(Gpt& model, int64_t first, int64_t count, int64_t samples) const = 0;
};

// Mean cross-entropy of the counted positions, in f32.
at::Tensor loss_of(Gpt& model, const Batch& batch);

// The `count` most likely next tokens, one after the other, of each row of `prompt`.
at::Tensor decode(Gpt& model, at::Tensor prompt, int64_t count);

// Random bits that depend on nothing but the four numbers.
uint64_t mix(uint64_t seed, uint64_t a, uint64_t b, uint64_t c);

}  // namespace plumb::model

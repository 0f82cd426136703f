// Weights: a step whose backwards are of sums (over tokens, say) is the mean over everything that was summed, on all ranks.
#pragma once

#include <deque>
#include <vector>

#include "grad/facts.h"
#include "grad/pass.h"
#include "grad/sink.h"

namespace plumb {

class Weights {
 public:
  // Deterministic mode keeps its sums elsewhere, and refuses gradients that were zeroed in place.
  enum class Zeroed { is_cleared, is_kept };
  Weights(int rank, Zeroed zeroed) : rank_(rank), zeroed_(zeroed) {}

  // An Error unless it is a number of things.
  static void check(int rank, double weight);
  // A pass whose backwards have weights: counted first, then joined to what is there, then each of them weighs. It ends
  // once, well or not.
  void begin_pass();
  // Before it brings a gradient: are those there that earlier weights stand for? Whoever clears them need not tell. An
  // Error if others are. Of pieces one rank does not know: where the pass is reduced, all ranks find out together.
  void join(const std::deque<Sink>& sinks, OpenPass::Sync sync);
  void ask(Facts& mine) const;
  void hear(const Agreement& all);
  // A backward of it is of a sum over `weight` things.
  void weigh(double weight);
  void end_pass(const std::deque<Sink>& sinks);
  // It has failed, here or on another rank: it is one of the step's passes, and weighs nothing.
  void failed() { sum_ = before_; }
  // It has failed, and is none of them.
  void drop() {
    failed();
    --count_;
  }

  double sum() const { return sum_; }
  int64_t count() const { return count_; }
  // At a step: what everybody's weights make of the mean over the ranks. An Error if they do not fit.
  void add(const Agreement& all);
  // What the mean over the ranks is to be multiplied by. Once; 1 from then on.
  double take_factor();
  void forget() { *this = Weights(rank_, zeroed_); }

 private:
  bool holds(const std::deque<Sink>& sinks) const;  // gradients that are not zero

  int rank_;
  Zeroed zeroed_;
  double sum_ = 0;       // of this rank's backwards of this step, as far as their gradients are still there
  double before_ = 0;    // the last pass of them
  int64_t count_ = 0;    // passes of this step that had one, those that failed included
  bool counts_ = false;  // one of them has ended well
  double factor_ = 1;    // see take_factor()
  bool held_ = false;    // gradients were there when the last of them ended
  bool known_ = false;   // and some .grad was, though of zeros, or of no element on this rank
  bool there_ = false;   // this rank's piece of some when the open pass began
  bool asks_ = false;    // whether they are everybody's to tell
};

}  // namespace plumb

// Weights: a step whose backwards are of sums (over tokens, say) is the mean over everything that was summed, on all ranks.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "grad/facts.h"
#include "grad/sink.h"

namespace plumb {

class Weights {
 public:
  // Deterministic mode keeps its sums elsewhere, and refuses gradients that were zeroed in place.
  enum class Zeroed { is_cleared, is_kept };
  Weights(int rank, Zeroed zeroed) : rank_(rank), zeroed_(zeroed) {}

  // An Error unless it is a number of things.
  static void check(int rank, double weight);
  // A pass whose backwards have weights, the step's `pass`th: counted first, then joined to what is there, then each of them weighs. It
  // ends once, well or not.
  void begin_pass(int64_t pass);
  // Before it brings a gradient: are those there that earlier weights stand for? Whoever clears them need not tell. An
  // Error if others are.
  void join(const std::deque<Sink>& sinks);
  // The look alone: of a pass without weights, which may follow a skipped step's.
  void look(const std::deque<Sink>& sinks, int64_t pass);
  bool carries() const { return count_ == 0 && !passes_.empty(); }
  // The engine's own call cleared them, before the next pass or inside of the open one.
  void cleared(std::optional<int64_t> open_pass);
  // A backward of it is of a sum over `weight` things.
  void weigh(double weight);
  void end_pass(const std::deque<Sink>& sinks);
  // It has failed, here or on another rank: it is one of the step's passes, and weighs nothing.
  void failed() { passes_.back().weight = 0; }
  // It has failed, and is none of them.
  void drop() {
    failed();
    --count_;
  }

  // Of this rank's backwards, as far as it knows that their gradients are still there.
  double sum() const;
  int64_t count() const { return count_; }
  // One rank's gradients may have no element here, or nothing but zeros: all ranks together know whether they were cleared. Everybody's
  // sum is in `all` afterwards. Ranks that saw the same send no more.
  void tell(Facts& mine) const;
  void hear(Group& control, Agreement& all, const Where& where);
  // At a step: what everybody's weights make of the mean over the ranks. An Error if they do not fit.
  void add(const Agreement& all);
  // What the mean over the ranks is to be multiplied by. Once; 1 from then on.
  double take_factor();
  // A step has ended. One that was skipped has left sums, which weigh what they weighed until they are cleared.
  void end_step();
  void forget() { *this = Weights(rank_, zeroed_); }

 private:
  bool holds(const std::deque<Sink>& sinks) const;  // gradients that are not zero

  // What a rank found in .grad when a pass began: nothing to tell by; numbers; zeros, where numbers had been; or that all of it had gone.
  enum class Saw : int64_t { unknown, numbers, zeros, nothing };
  struct OfPass {
    double weight = 0;
    Saw saw = Saw::unknown;
  };
  OfPass& at(int64_t pass);
  void drop_before(int64_t pass, Saw why);

  int rank_;
  Zeroed zeroed_;
  std::vector<OfPass> passes_;  // of this step; before them, what a skipped one left
  int64_t from_ = 0;            // the first that counts, as far as this rank knows
  bool told_ = true;            // the others know that it is the first
  int64_t count_ = 0;           // passes of this step that had a weight, those that failed included
  bool counts_ = false;         // one of them, or of those before a skipped step, has ended well
  double factor_ = 1;           // see take_factor()
  bool held_ = false;           // gradients were there when the last of them ended
  bool known_ = false;          // and some .grad was, though of zeros, or of no element on this rank
  bool there_ = false;          // gradients were there at the last look
  bool cleared_ = false;        // by the engine's own call since then
};

}  // namespace plumb

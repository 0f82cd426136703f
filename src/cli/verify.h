// --verify K: silent corruption, found and named. Every K steps, what ranks hold alike is compared, and so is what each rank
// contributed to the reduction with what a neighbour computes of the same samples: replicas agree on a wrong sum, too.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/job.h"
#include "engine/slots.h"

namespace plumb::cli {

class Verifier {
 public:
  // `every` 0: never.
  Verifier(Engine& engine, Job& job, int64_t every) : engine_(engine), job_(job), every_(every) {}
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;

  // Before each micro-batch of a step: the gradients of one of them, in turn, are digested as they come.
  void before(int64_t step, int64_t micro);
  // Between the backwards of a step and its step(). An Error on every rank names the rank that is at fault. Collective.
  void after(int64_t step, int64_t samples);

 private:
  using Digests = std::vector<int64_t>;  // by parameter; 0: it has no gradient
  bool due(int64_t step) const { return every_ > 0 && (step + 1) % every_ == 0; }
  int64_t turn(int64_t step) const { return (step / every_) % job_.micros(); }
  Digests recomputed(int64_t samples, int rank, int64_t micro);
  // What this rank holds, piece by piece, and in two words: of what all hold alike, and of what only the same shard of each
  // replica holds alike.
  struct State {
    using Words = std::array<int64_t, 2>;
    std::vector<SavedSlot> slots;
    Digests digests;
    Words words{};
  };
  State state_now();
  std::vector<Digests> everybodys(const Digests& mine, const std::string& what, int64_t step) const;
  void check_state(int64_t step, const State& state, const std::vector<State::Words>& said);
  void check_contributions(int64_t step, int64_t samples, const std::vector<Digests>& own,
                           const std::vector<Digests>& checked);

  Engine& engine_;
  Job& job_;
  const int64_t every_;
  Digests own_;
};

}  // namespace plumb::cli

// Changes: what the user did between our calls, to parameters and to gradients, must have come out the same on every rank.
#pragma once

#include <deque>
#include <vector>

#include "grad/facts.h"
#include "grad/sink.h"
#include "grad/team.h"

namespace plumb {

class Changes {
 public:
  explicit Changes(Team& team) : team_(team), watches_parameters_(team.size() > 1) {}

  // The parameters are as they should be now; alone, or while somebody else steps them, nobody looks.
  void remember_parameters(const std::deque<Sink>& sinks);
  void leave_parameters_to_user() { watches_parameters_ = false; }
  // The user's step over them has ended.
  void take_parameters_back(const std::deque<Sink>& sinks);
  // By sink: whether the user changed it since then.
  std::vector<bool> changed_parameters(const std::deque<Sink>& sinks) const;
  // Whatever one rank changed must have the same values on all. Collective where somebody did.
  void check_parameters(const std::deque<Sink>& sinks, const Agreement& all, const Where& where);

  // Before a pass, and before a step: what became of each gradient since the ranks last agreed on it. They agree on none
  // while contributions wait for their reduction (`held`), nor with a rank that is absent.
  void look_at_gradients(const std::deque<Sink>& sinks, bool held, bool absent);
  const std::vector<bool>& cleared() const { return cleared_; }
  const std::vector<bool>& touched() const { return touched_; }
  const std::vector<bool>& intact() const { return intact_; }
  const std::vector<bool>& extended() const { return extended_; }
  // An Error, on every rank, if one rank cleared or changed a gradient and another did not.
  void check_gradients(const std::deque<Sink>& sinks, const Agreement& all) const;

 private:
  // Of a parameter, when the last step ended.
  struct Seen {
    int64_t version = 0;
    const void* place = nullptr;
  };
  bool changed(const Sink& sink) const;

  Team& team_;
  bool watches_parameters_;  // whether ranks could change them differently, and a step alone should
  std::vector<Seen> seen_;   // by sink
  std::vector<bool> cleared_, touched_, intact_, extended_;
};

}  // namespace plumb

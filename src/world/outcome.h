// Outcomes of work of which every rank does a part: what fails on one of them fails on all, and says whose it was.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "world/group.h"

namespace plumb {

struct Outcome {
  std::string text;
  std::string error;  // empty: it went well
};

// What `work` returns or throws.
Outcome attempt(const std::function<std::string()>& work);

// A rank's part failed, and every rank knows: communication goes on.
class RankFailed : public std::runtime_error {
 public:
  RankFailed(const std::string& what, int the_rank, std::string the_reason)
      : std::runtime_error(what), rank(the_rank), why(std::move(the_reason)) {}
  const int rank;
  const std::string why;
};

// Everybody's text in rank order. Otherwise a RankFailed on every rank, of the first whose part failed: "save() failed on
// rank 1: …", where `where.detail` is "save()"; so are ranks whose details differ. Collective.
std::vector<std::string> share_outcome(const World& world, const Outcome& mine, const Where& where);

}  // namespace plumb

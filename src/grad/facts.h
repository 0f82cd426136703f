// Facts: what a rank tells the others at the end of a pass and at a step, and what everybody makes of it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "world/group.h"

namespace plumb {

// A flat list of int64 on the wire.
struct Facts {
  Where::Kind kind = Where::Kind::backward;
  int64_t step = 0;
  int64_t pass = 0;
  bool failed = false;    // this rank's backward threw: its gradients are incomplete
  int64_t newcomers = 0;  // digest of the parameters that began to require a gradient; 0: none
  int64_t rules = 0;      // digest of the dtypes that the parameters' gradients have
  int64_t settings = 0;   // digest of what must be alike: at a step, or in a backward
  int64_t gathers = 0;    // digest of the parameters that were gathered by messages, in order
  int64_t weighted = 0;   // how many backwards of this step had a weight
  int64_t since = 0;      // the first that counts, where this rank saw since the last facts that others were cleared
  bool absent = false;    // this rank ran out of inputs and contributes nothing
  bool writes = false;    // neither: it is in a call of the user's that writes parameters
  // By bucket.
  std::vector<bool> late;  // must be reduced (again)
  std::vector<bool> idle;  // none of its parameters is trained at the moment
  // By parameter.
  std::vector<bool> used;     // this rank has a gradient
  std::vector<bool> changed;  // at a step: the user changed the parameter since the last one; or writes it now
  // What the user did to the gradient that the ranks had agreed on; none of them where they had not.
  std::vector<bool> cleared, touched, intact;
  // What waits for its reduction was added to the gradient that they had agreed on.
  std::vector<bool> extended;
  double weight = 0;  // of this rank's backwards in this step; travels apart

  // Everything that is told by bucket and by parameter is of so many; what comes anew is false.
  void fit(size_t buckets, size_t parameters);
  std::vector<int64_t> pack() const;
  static Facts unpack(std::span<const int64_t> words, size_t buckets, size_t parameters);
};

// The user's call that writes these of the named parameters, as he wrote it.
std::string write_call(const std::vector<std::string>& names, const std::vector<bool>& which);

// What everybody's facts come to, the same on every rank. They are combined on their way; who said what is asked for only
// where there is something to tell.
struct Agreement {
  Facts any;    // by bit: what some rank said
  Facts every;  // by bit: what every rank said
  double weight = 0;
  int ranks = 1;
  std::vector<Facts> everybody{};  // in rank order; empty where nothing must be told

  // Whether some rank has a gradient for this parameter.
  bool used_anywhere(int parameter) const { return any.used[static_cast<size_t>(parameter)]; }
};

// Throws on every rank if the facts do not belong together: another call of the user's, another number of backwards or
// steps, other rules, other newcomers. `names`: of the parameters.
Agreement agree(Group& control, int rank, const std::vector<std::string>& names, const Facts& mine, const Where& where);

// What the user may set between steps, by name.
using Settings = std::vector<std::pair<std::string, double>>;
int64_t digest_of(const Settings& settings);
// An Error that names the first that differs, and both values. Collective where one does.
void check_settings(Group& control, int rank, const Settings& mine, const Agreement& all, const Where& where);

// An Error if a backward failed, or a step was refused, on another rank.
void check_nobody_failed(int rank, const Agreement& all);

// A bucket is reduced everywhere if one rank asks for it.
void join_late(const Agreement& all, std::vector<bool>& late);

}  // namespace plumb

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
  bool failed = false;     // this rank's backward threw: its gradients are incomplete
  int64_t newcomers = 0;   // digest of the parameters that began to require a gradient; 0: none
  int64_t rules = 0;       // digest of the dtypes that the parameters' gradients have
  int64_t settings = 0;    // at a step: digest of what the user may set between steps
  double weight = 0;       // of this rank's backwards in this step
  int64_t weighted = 0;    // how many of them had one
  bool absent = false;     // this rank ran out of inputs and contributes nothing
  bool writes = false;     // neither: it is in a call of the user's that writes parameters
  std::vector<bool> late;  // by bucket: must be reduced (again)
  // By parameter.
  std::vector<bool> used;     // this rank has a gradient
  std::vector<bool> changed;  // at a step: the user changed the parameter since the last one; or writes it now
  // What the user did to the gradient that the ranks had agreed on; none of them where they had not.
  std::vector<bool> cleared, touched, intact;

  std::vector<int64_t> pack() const;
  static Facts unpack(std::span<const int64_t> words, size_t buckets, size_t parameters);
};

// The user's call that writes these of the named parameters, as he wrote it.
std::string write_call(const std::vector<std::string>& names, const std::vector<bool>& which);

// Everybody's facts, in rank order. Throws on every rank if they do not belong together: another call of the user's, another
// number of backwards or steps, other rules, other newcomers. `names`: of the parameters.
std::vector<Facts> agree(Group& control, int rank, const std::vector<std::string>& names, const Facts& mine,
                         const Where& where);

// What the user may set between steps, by name.
using Settings = std::vector<std::pair<std::string, double>>;
int64_t digest_of(const Settings& settings);
// An Error that names the first that differs, and both values. Collective where one does.
void check_settings(Group& control, int rank, const Settings& mine, const std::vector<Facts>& all, const Where& where);

// An Error if a backward failed on another rank.
void check_nobody_failed(int rank, const std::vector<Facts>& all);

// A bucket is reduced everywhere if one rank asks for it.
void join_late(const std::vector<Facts>& all, std::vector<bool>& late);

// Whether some rank has a gradient for this parameter.
bool used_anywhere(const std::vector<Facts>& all, int parameter);

}  // namespace plumb

// Facts: what a rank tells the others at the end of a pass and at a step. A flat list of int64 on the wire.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "world/group.h"

namespace plumb {

struct Facts {
  Where::Kind kind = Where::Kind::backward;
  int64_t step = 0;
  int64_t pass = 0;
  bool failed = false;          // this rank's backward threw: its gradients are incomplete
  int64_t newcomers = 0;        // digest of the parameters that began to require a gradient; 0: none
  int64_t rules = 0;            // digest of the dtypes that the parameters' gradients have
  double factor = 0;            // by which the user scaled this rank's pieces, all of them alike; 0: not known
  std::vector<bool> late;       // by bucket: must be reduced (again)
  std::vector<bool> used;       // by parameter: this rank has a gradient
  std::vector<bool> changed{};  // by parameter, at a step: the user changed it since the last one

  std::vector<int64_t> pack() const;
  static Facts unpack(std::span<const int64_t> words, size_t buckets, size_t parameters);
};

// A bucket is reduced everywhere if one rank asks for it.
void join_late(const std::vector<Facts>& all, std::vector<bool>& late);

}  // namespace plumb

// Neighbours: parameters that this rank has whole, in memory one behind the other as their gradients lie, so that an optimizer
// of the user's own that treats every element alike is given a few long tensors in place of many short ones.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "grad/bucket.h"
#include "optim/stretches.h"

namespace plumb {

class Neighbours {
 public:
  // Those whose gradients are what their buckets hold. A parameter moves where nobody can tell: it stays the same tensor over the
  // same storage, whose memory is elsewhere. Where somebody could (other tensors or arrays over it, memory that is shared, mapped
  // or borrowed), on devices, whose graphs know addresses, and where it would be alone, it stays, and is in no stretch.
  const Stretches& lend(std::deque<Bucket>& buckets);
  const Stretches& stretches() const { return stretches_; }  // of the last call
  void take_back() { stretches_.drop_gradients(); }

 private:
  // The memory of one bucket's parameters.
  struct Street {
    at::Tensor flat;
    std::vector<std::pair<int, int64_t>> houses;  // by sink: where it lies, or would
  };
  void settle(const Bucket& bucket, Street& street) const;

  std::vector<Street> streets_;  // by bucket
  Stretches stretches_;
};

}  // namespace plumb

// Traffic: what travels when. Reductions begin in bucket order, the same on every rank; neighbours form a
// convoy and begin together where messages, or calls of a device, are dear. The last convoy waits for the end of the backward: its last gradient comes then anyway.
#pragma once

#include <vector>

#include "grad/buckets.h"
#include "grad/faults.h"
#include "grad/summing.h"
#include "watch/road.h"

namespace plumb {

class Traffic {
 public:
  Traffic(Buckets& buckets, Summing& summing, Road& road, const Fault& fault)
      : buckets_(buckets), summing_(summing), road_(road), fault_(fault) {}

  // After the buckets were laid out. From what every rank knows alike: all ranks must send the same messages.
  void form_convoys(int64_t bucket_bytes);

  // A pass opens: nothing has begun.
  void restart() { next_ = 0; }
  // Whatever is complete, and has nothing incomplete before it.
  void launch_ready(const Where& where);
  // Everything else.
  void launch_rest(const Where& where);
  // Those before `end`, complete or not.
  void launch_up_to(size_t end, const Where& where);
  size_t launched() const { return next_; }
  // Nothing more begins by itself.
  void hold(bool on) { held_ = on; }

  // One bucket, out of turn.
  void launch(Bucket& bucket, const Where& where);
  void reduce_and_wait(const std::vector<bool>& which, const Where& where);
  void finish_all(const Where& where);

 private:
  size_t end_of_convoy(size_t begin) const;  // by index of a bucket
  void launch_convoy(const Where& where);
  void begin(Bucket& bucket, const Where& where);

  Buckets& buckets_;
  Summing& summing_;
  Road& road_;
  const Fault& fault_;
  size_t next_ = 0;  // the next bucket to reduce
  bool held_ = false;
};

}  // namespace plumb

// Passes that are captured into a graph, whose replays the host never sees: what they would find moved, or write past
// .grad, is refused.
#include "grad/reducer.h"

namespace plumb {

void Reducer::prepare_capture() {
  bool captured = false;
  buckets_.for_devices([&](c10::Device device) { captured = captured || capturing(device); });
  if (!captured) return;
  if (steps_ == 0) {
    throw Error(
        team_.rank(),
        "a backward is captured into a graph before the first step, which lays out memory; run a whole step with "
        "the same gradients first, on the same stream");
  }
  rebuilt_ = true;  // from here on, gradients stay where the graph writes them
}

void Reducer::note_capture() {
  buckets_.for_devices([&](c10::Device device) {
    if (!capturing(device)) return;
    for (Bucket& bucket : buckets_) {
      if (bucket.device() == device && bucket.has_gradient()) bucket.captured = true;
    }
  });
}

// A replay fills the memory of the gradients, and .grad must still show it.
void Reducer::check_captured() const {
  if (passes_ > 0) return;
  bool captured = false;
  for (const Bucket& bucket : buckets_) {
    if (bucket.has_gradient()) return;
    captured = captured || bucket.captured;
  }
  if (!captured) return;
  throw Error(
      team_.rank(),
      "step() without a gradient or a backward, and a backward was captured into a graph: its replays fill the "
      "gradients that the captured backward left, which have been cleared since; do not call zero_grad() between "
      "a replay and step(), nor between replays that begin afresh, or capture step() and zero_grad(), too");
}

}  // namespace plumb

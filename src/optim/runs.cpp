#include "optim/runs.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace plumb {

std::vector<Run> runs_of(const Bucket& bucket, const Range& within,
                         const std::function<bool(const Sink&, const Sink&)>& alike) {
  std::vector<Run> runs;
  const Sink* previous = nullptr;
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    const Sink& sink = *bucket.sinks[i];
    const int64_t begin = std::max(sink.slot.offset, within.begin);
    const int64_t end = std::min(bucket.after(i), within.end);
    if (begin >= end) continue;
    const bool active = sink.grad().defined();
    if (active) {
      if (previous != nullptr && alike(*previous, sink)) {
        runs.back().end = end;
      } else {
        runs.push_back({begin, end, &sink});
      }
    }
    previous = active ? &sink : nullptr;
  }
  return runs;
}

at::Tensor part(const at::Tensor& flat, const Range& covers, const Run& run) {
  const at::Tensor piece = run.begin == covers.begin && run.end == covers.end
                               ? flat
                               : flat.narrow(0, run.begin - covers.begin, run.end - run.begin);
  return piece.is_complex() ? at::view_as_real(piece).view(-1) : piece;
}

}  // namespace plumb

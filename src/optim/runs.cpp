#include "optim/runs.h"

#include <ATen/ATen.h>

namespace plumb {

std::vector<Run> runs_of(const Bucket& bucket, const std::function<bool(const Sink&, const Sink&)>& alike) {
  std::vector<Run> runs;
  const Sink* previous = nullptr;
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    const Sink& sink = *bucket.sinks[i];
    const bool active = sink.grad().defined();
    if (active) {
      const int64_t end = i + 1 < bucket.sinks.size() ? bucket.sinks[i + 1]->slot.offset : bucket.gradient.numel();
      if (previous != nullptr && alike(*previous, sink)) {
        runs.back().end = end;
      } else {
        runs.push_back({sink.slot.offset, end, &sink});
      }
    }
    previous = active ? &sink : nullptr;
  }
  return runs;
}

at::Tensor part(const at::Tensor& flat, const Run& run) {
  const at::Tensor piece =
      run.begin == 0 && run.end == flat.numel() ? flat : flat.narrow(0, run.begin, run.end - run.begin);
  return piece.is_complex() ? at::view_as_real(piece).view(-1) : piece;
}

}  // namespace plumb

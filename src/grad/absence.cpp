#include "grad/absence.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace plumb {

void Absence::begin(const std::deque<Sink>& sinks) {
  now_ = true;
  means_.assign(sinks.size(), {});
  users_.assign(sinks.size(), {});
  for (const Sink& sink : sinks) {
    if (sink.agreed && sink.view.defined()) means_[sink.index] = sink.view.clone();
    users_[sink.index] = std::exchange(sink.grad(), {});
  }
}

void Absence::end(const std::deque<Sink>& sinks) {
  now_ = false;
  for (const Sink& sink : sinks) {
    if (static_cast<size_t>(sink.index) < users_.size()) sink.grad() = users_[sink.index];
  }
  means_.clear();
  users_.clear();
}

void Absence::make_up(const std::deque<Sink>& sinks, const Agreement& all, std::vector<bool>& late) {
  if (!all.any.absent) return;
  at::NoGradGuard no_grad;
  for (const Sink& sink : sinks) {
    const auto index = static_cast<size_t>(sink.index);
    if (!all.any.intact[index] && !all.any.extended[index]) continue;
    late[static_cast<size_t>(sink.slot.bucket)] = true;
    if (now_ && sink.grad().defined() && means_[index].defined()) sink.grad().add_(means_[index]);
  }
}

}  // namespace plumb

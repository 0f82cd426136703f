#include "grad/changes.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "grad/manifest.h"

namespace plumb {
namespace {

// Where a parameter lies. One of a unit has memory only now and then, and a storage always.
const void* place_of(const Sink& sink) {
  return sink.unit >= 0 ? sink.parameter.storage().unsafeGetStorageImpl() : sink.parameter.const_data_ptr();
}

}  // namespace

// ---- parameters

void Changes::remember_parameters(const std::deque<Sink>& sinks) {
  if (!watches_parameters_) return;
  seen_.resize(sinks.size());
  for (const Sink& sink : sinks) {
    if (sink.parameter.is_cpu()) seen_[sink.index] = {sink.parameter._version(), place_of(sink)};
  }
}

void Changes::take_parameters_back(const std::deque<Sink>& sinks) {
  watches_parameters_ = team_.size() > 1;
  remember_parameters(sinks);
}

bool Changes::changed(const Sink& sink) const {
  const auto index = static_cast<size_t>(sink.index);
  if (!sink.parameter.is_cpu() || index >= seen_.size()) return false;  // on a device, the host would have to wait
  return place_of(sink) != seen_[index].place || (sink.unit < 0 && sink.parameter._version() != seen_[index].version);
}

std::vector<bool> Changes::changed_parameters(const std::deque<Sink>& sinks) const {
  std::vector<bool> by_sink(sinks.size());
  if (!watches_parameters_) return by_sink;
  for (const Sink& sink : sinks) by_sink[sink.index] = changed(sink);
  return by_sink;
}

void Changes::check_parameters(const std::deque<Sink>& sinks, const Agreement& all, const Where& where) {
  std::vector<const Sink*> touched;
  std::vector<int64_t> digests;
  for (const Sink& sink : sinks) {
    const auto index = static_cast<size_t>(sink.index);
    if (!all.any.changed[index]) continue;
    touched.push_back(&sink);
    const bool released = sink.unit >= 0 && !changed(sink);
    digests.push_back(released ? 0 : digest_of(sink.parameter));
  }
  if (touched.empty()) return;
  const auto everybodys = team_.control().exchange(digests, where);
  for (size_t i = 0; i < touched.size(); ++i) {
    for (size_t rank = 1; rank < everybodys.size(); ++rank) {
      if (everybodys[rank][i] == everybodys[0][i]) continue;
      throw Error(team_.rank(), "parameter '" + touched[i]->name +
                                    "' was changed between steps, and has other values on rank " +
                                    std::to_string(rank) +
                                    " than on rank 0; change it alike on every rank, or on rank 0 inside "
                                    "engine.gathered({...}, Access::write)");
    }
  }
}

// ---- gradients

void Changes::look_at_gradients(const std::deque<Sink>& sinks, bool held, bool absent) {
  // It was intact before the first contribution that is held, and nobody but those was there since.
  std::vector<bool> extended(sinks.size());
  for (const Sink& sink : sinks) {
    const auto index = static_cast<size_t>(sink.index);
    if (!held || absent || index >= intact_.size()) continue;
    const bool is_left =
        sink.grad_mirrored() ? !sink.changed_beside_view() : sink.grad_shows_view() && !sink.changed_in_place();
    extended[index] = is_left && (intact_[index] || extended_[index]);
  }
  extended_ = std::move(extended);
  for (auto* bits : {&cleared_, &touched_, &intact_}) bits->assign(sinks.size(), false);
  if (team_.size() == 1 || held || absent) return;
  for (const Sink& sink : sinks) {
    const auto index = static_cast<size_t>(sink.index);
    if (!sink.agreed) continue;
    if (!sink.grad().defined()) {
      cleared_[index] = true;
    } else if (sink.grad_shows_view() && sink.view.numel() > 0) {
      (sink.changed_in_place() ? touched_ : intact_)[index] = true;
    } else if (sink.grad_mirrored() && sink.view.numel() > 0) {
      (sink.changed_beside_view() ? touched_ : intact_)[index] = true;
    }
  }
}

void Changes::check_gradients(const std::deque<Sink>& sinks, const Agreement& all) const {
  if (all.everybody.empty()) return;  // they did alike
  struct Kind {
    std::vector<bool> Facts::* bits;
    const char* what;
  };
  const Kind kinds[] = {{&Facts::cleared, "cleared"}, {&Facts::touched, "changed in place"}, {&Facts::intact, "left"}};
  for (const Sink& sink : sinks) {
    const auto index = static_cast<size_t>(sink.index);
    const Kind* first = nullptr;
    size_t who = 0;
    for (size_t rank = 0; rank < all.everybody.size(); ++rank) {
      for (const Kind& kind : kinds) {
        if (!(all.everybody[rank].*kind.bits)[index]) continue;
        if (first == nullptr) {
          first = &kind;
          who = rank;
        } else if (first != &kind) {
          throw Error(team_.rank(), "the reduced gradient of parameter '" + sink.name + "' was " + first->what +
                                        " on rank " + std::to_string(who) + " and " + kind.what + " on rank " +
                                        std::to_string(rank) +
                                        "; clear gradients (zero_grad) and change them alike on every rank");
        }
      }
    }
  }
}

}  // namespace plumb

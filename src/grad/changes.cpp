// Changes: what the user did to whole parameters between two steps must have come out the same on every rank.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "grad/reducer.h"
#include "layout/digest.h"

namespace plumb {
namespace {

int64_t digest_of(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  const at::Tensor values = parameter.detach().contiguous();
  const auto* words = static_cast<const char*>(values.const_data_ptr());
  const size_t bytes = values.nbytes();
  Digest digest;
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, words + at, sizeof word);
    digest.add(word);
    digest.add(word >> 32);
  }
  digest.add(std::span(words + at, bytes - at));
  return digest.value();
}

// Where a parameter lies. One of a unit has memory only now and then, and a storage always.
const void* place_of(const Sink& sink) {
  return sink.unit >= 0 ? sink.parameter.storage().unsafeGetStorageImpl() : sink.parameter.const_data_ptr();
}

bool changed(const Sink& sink) {
  if (!sink.parameter.is_cpu()) return false;  // the host would have to wait
  return place_of(sink) != sink.seen_place || (sink.unit < 0 && sink.parameter._version() != sink.seen_version);
}

}  // namespace

void Reducer::remember_parameters() {
  if (!watches_parameters_ || control_.size() == 1) return;
  for (Sink& sink : sinks_) {
    if (!sink.parameter.is_cpu()) continue;
    sink.seen_version = sink.parameter._version();
    sink.seen_place = place_of(sink);
  }
}

std::vector<bool> Reducer::changed_parameters() const {
  std::vector<bool> by_parameter(sinks_.size());
  if (!watches_parameters_) return by_parameter;
  for (const Sink& sink : sinks_) by_parameter[sink.index] = changed(sink);
  return by_parameter;
}

void Reducer::check_changes(const std::vector<Facts>& all) {
  std::vector<const Sink*> touched;
  std::vector<int64_t> digests;
  for (const Sink& sink : sinks_) {
    const auto index = static_cast<size_t>(sink.index);
    if (std::none_of(all.begin(), all.end(), [&](const Facts& facts) { return facts.changed[index]; })) continue;
    touched.push_back(&sink);
    const bool released = sink.unit >= 0 && !changed(sink);
    digests.push_back(released ? 0 : digest_of(sink.parameter));
  }
  if (touched.empty()) return;
  const auto everybodys = control_.exchange(digests, here(Where::Kind::step, "the parameters that were changed"));
  for (size_t i = 0; i < touched.size(); ++i) {
    for (size_t rank = 1; rank < everybodys.size(); ++rank) {
      if (everybodys[rank][i] == everybodys[0][i]) continue;
      throw Error(world_.rank(), "parameter '" + touched[i]->name +
                                     "' was changed between steps, and has other values on rank " +
                                     std::to_string(rank) +
                                     " than on rank 0; change it alike on every rank, or on rank 0 inside "
                                     "engine.gathered({...}, Access::write)");
    }
  }
}

}  // namespace plumb

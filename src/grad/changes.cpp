// Changes: what the user did to whole parameters between two steps, and to gradients before one, must have come out the
// same on every rank.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "grad/manifest.h"
#include "grad/reducer.h"

namespace plumb {
namespace {

// Where a parameter lies. One of a unit has memory only now and then, and a storage always.
const void* place_of(const Sink& sink) {
  return sink.unit >= 0 ? sink.parameter.storage().unsafeGetStorageImpl() : sink.parameter.const_data_ptr();
}

// Of a piece in f32 or f64 that has any; otherwise nothing is said.
std::optional<Samples> samples_of(const at::Tensor& piece) {
  if (piece.scalar_type() != at::kFloat && piece.scalar_type() != at::kDouble) return std::nullopt;
  if (piece.numel() == 0) return std::nullopt;
  const at::Tensor dense = piece.is_contiguous() ? piece : piece.detach().contiguous();
  const void* values = dense.const_data_ptr();
  const auto value = [&](int64_t i) {
    return dense.scalar_type() == at::kFloat ? static_cast<double>(static_cast<const float*>(values)[i])
                                             : static_cast<const double*>(values)[i];
  };
  Samples samples;
  const auto steps = static_cast<int64_t>(samples.size()) - 1;
  for (int64_t i = 0; i <= steps; ++i) samples[i] = value((dense.numel() - 1) * i / steps);
  return samples;
}

bool changed(const Sink& sink) {
  if (!sink.parameter.is_cpu()) return false;  // the host would have to wait
  return place_of(sink) != sink.seen_place || (sink.unit < 0 && sink.parameter._version() != sink.seen_version);
}

}  // namespace

void Reducer::remember_parameters() {
  if (!watches_parameters_) return;
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

// ---- pieces of gradients

// Clipping by the norm of a rank's own pieces scales them, on each rank by another factor. To notice, some elements of
// every piece are remembered; all of a rank's pieces scaled alike, and those of its neighbour, with which it shares a
// parameter, otherwise, is not what anybody means. Elements of one size alone tell nothing: their signs would look so.
void Reducer::sample_pieces() {
  if (!shards_gradient_ || deterministic_ || groups_.shard.size() == 1) return;
  for (Sink& sink : sinks_) {
    if (!sink.grad_in_bucket() || !sink.view.is_cpu()) continue;
    sink.samples = samples_of(sink.view);
  }
}

double Reducer::factor_of_pieces() const {
  double factor = 0, least = std::numeric_limits<double>::infinity(), most = 0;
  int seen = 0;
  for (const Sink& sink : sinks_) {
    if (!sink.samples || !sink.grad().defined() || !sink.grad().is_cpu()) continue;
    if (sink.grad().sizes() != sink.view.sizes()) continue;
    const auto now = samples_of(sink.grad());
    if (!now) return 0;
    for (size_t i = 0; i < now->size(); ++i) {
      if ((*sink.samples)[i] == 0) continue;
      const double ratio = (*now)[i] / (*sink.samples)[i];
      if (seen++ == 0) factor = ratio;
      if (!(std::abs(ratio - factor) <= 1e-5 * std::abs(factor))) return 0;
      least = std::min(least, std::abs((*sink.samples)[i]));
      most = std::max(most, std::abs((*sink.samples)[i]));
    }
  }
  return most > 1.001 * least ? factor : 0;
}

void Reducer::check_factors(const std::vector<Facts>& all) {
  const auto shards = static_cast<size_t>(groups_.shard.size());
  for (Sink& sink : sinks_) sink.samples.reset();
  for (size_t rank = 0; rank + 1 < all.size(); ++rank) {
    const double mine = all[rank].factor, next = all[rank + 1].factor;
    const size_t part = rank % shards;
    if (part + 1 == shards || mine == 0 || next == 0) continue;
    if (std::abs(mine - next) <= 1e-4 * std::max(std::abs(mine), std::abs(next))) continue;
    for (const Sink& sink : sinks_) {
      const auto index = static_cast<size_t>(sink.index);
      const int64_t cut =
          buckets_[sink.slot.bucket].numel / static_cast<int64_t>(shards) * static_cast<int64_t>(part + 1);
      const bool cuts = sink.slot.offset < cut && cut < sink.slot.offset + sink.parameter.numel();
      if (!cuts || !all[rank].used[index] || !all[rank + 1].used[index]) continue;
      throw Error(world_.rank(), c10::str("the pieces of gradients were scaled by ", mine, " on rank ", rank,
                                          " and by ", next, " on rank ", rank + 1, ", those of parameter '", sink.name,
                                          "' among them; a norm of pieces (clip_grad_norm_) is each rank's own: use "
                                          "Options::clip_norm, which clips by the norm of all of them"));
    }
  }
}

}  // namespace plumb

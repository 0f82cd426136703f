#include "optim/counts.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace plumb {
namespace {

constexpr int64_t kPlaces = 1024;  // of a block

}  // namespace

void Counts::make_place(const Sink& sink) {
  if (of(sink).defined()) return;
  const c10::Device device = sink.parameter.device();
  auto block = std::ranges::find_if(blocks_, [&](const Block& one) {
    return one.counts.device() == device && static_cast<int64_t>(one.sinks.size()) < kPlaces;
  });
  if (block == blocks_.end()) {
    block = blocks_.insert(block, {at::zeros({kPlaces}, at::device(device).dtype(at::kFloat)), {}});
  }
  const auto index = static_cast<size_t>(sink.index);
  if (places_.size() <= index) places_.resize(index + 1);
  places_[index] = block->counts.select(0, static_cast<int64_t>(block->sinks.size()));
  block->sinks.push_back(sink.index);
}

const at::Tensor& Counts::of(const Sink& sink) const {
  static const at::Tensor none;
  const auto index = static_cast<size_t>(sink.index);
  return index < places_.size() ? places_[index] : none;
}

void Counts::count(const std::vector<bool>& updated) {
  for (const Block& block : blocks_) {
    const auto active = [&](int64_t place) {
      const auto sink = static_cast<size_t>(block.sinks[place]);
      return sink < updated.size() && updated[sink];
    };
    const auto places = static_cast<int64_t>(block.sinks.size());
    std::vector<at::Tensor> stretches;
    for (int64_t begin = 0, end = 0; begin < places; begin = end + 1) {
      for (end = begin; end < places && active(end);) ++end;
      if (end > begin) stretches.push_back(block.counts.narrow(0, begin, end - begin));
    }
    if (!stretches.empty()) at::_foreach_add_(stretches, 1);
  }
}

}  // namespace plumb

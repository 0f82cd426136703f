#include "optim/neighbours.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace plumb {
namespace {

// Kernels may round what is left behind their last whole vector in another way. So that every element is rounded as it is
// where each parameter is updated by itself, one that has such a rest ends its stretch.
constexpr size_t kVectorBytes = 64;

void let_go(void* memory) { delete static_cast<at::Tensor*>(memory); }

const void* house(const at::Tensor& flat, const Sink& sink) {
  return static_cast<const char*>(flat.const_data_ptr()) + sink.slot.offset * flat.element_size();
}

// Its gradient is what its bucket holds, in the same order and of the same kind.
bool fits(const Sink& sink) {
  const at::Tensor& parameter = sink.parameter;
  if (!parameter.device().is_cpu() || !parameter.is_floating_point() || parameter.numel() == 0) return false;
  if (parameter.dim() == 0)
    return false;  // what an optimizer keeps of its element looks like what it keeps of all of it
  if (parameter.unsafeGetTensorImpl()->is_python_dispatch() || parameter.is_inference()) return false;
  if (!sink.grad_shows_view() || sink.grad().requires_grad()) return false;
  return parameter.is_non_overlapping_and_dense() && sink.view.scalar_type() == parameter.scalar_type() &&
         sink.grad().scalar_type() == parameter.scalar_type() && sink.view.strides() == parameter.strides() &&
         sink.grad().strides() == parameter.strides();
}

// Nobody but the parameter knows where its memory is.
bool may_move(const at::Tensor& parameter) {
  const c10::Storage& storage = parameter.storage();
  const c10::DeleterFnPtr deleter = storage.data_ptr().get_deleter();
  const bool ours = deleter == &let_go;
  const bool ordinary = deleter != nullptr && deleter == c10::GetCPUAllocator()->raw_deleter();
  // A tensor that became a numpy array has a storage that cannot be resized.
  return (ours || ordinary) && storage.use_count() == 1 && storage.resizable() && parameter.storage_offset() == 0 &&
         storage.nbytes() == parameter.nbytes();
}

}  // namespace

// Brings those home that are elsewhere.
void Neighbours::settle(const Bucket& bucket, Street& street) const {
  for (const Sink* sink : bucket.sinks) {
    if (!fits(*sink) || sink->parameter.const_data_ptr() == house(street.flat, *sink) || !may_move(sink->parameter))
      continue;
    auto* place = static_cast<char*>(street.flat.mutable_data_ptr()) + sink->slot.offset * street.flat.element_size();
    std::memcpy(place, sink->parameter.const_data_ptr(), sink->parameter.nbytes());
    c10::StorageImpl& storage = *sink->parameter.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap({place, new at::Tensor(street.flat), &let_go, street.flat.device()});
  }
}

const Stretches& Neighbours::lend(std::deque<Bucket>& buckets) {
  at::NoGradGuard no_grad;
  std::vector<Stretch> now;
  streets_.resize(buckets.size());
  for (const Bucket& bucket : buckets) {
    const auto fit = [](const Sink* sink) { return fits(*sink); };
    if (std::ranges::count_if(bucket.sinks, fit) < 2 || bucket.kept.size() != bucket.numel) continue;
    Street& street = streets_[static_cast<size_t>(bucket.index)];
    std::vector<std::pair<int, int64_t>> houses;
    for (const Sink* sink : bucket.sinks) houses.emplace_back(sink->index, sink->slot.offset);
    if (!street.flat.defined() || street.houses != houses || street.flat.numel() != bucket.numel ||
        street.flat.scalar_type() != bucket.dtype) {
      // Others may still live in the old one, whose memory goes with the last of them.
      street = {at::zeros({bucket.numel}, at::TensorOptions().dtype(bucket.dtype)), std::move(houses)};
    }
    settle(bucket, street);
    std::vector<std::vector<const Sink*>> open;
    bool joins = false;  // the last one goes on
    for (const Sink* sink : bucket.sinks) {
      const bool home = fits(*sink) && sink->parameter.const_data_ptr() == house(street.flat, *sink);
      if (home && !joins) open.emplace_back();
      if (home) open.back().push_back(sink);
      joins = home && sink->parameter.nbytes() % kVectorBytes == 0;
    }
    for (const std::vector<const Sink*>& sinks : open) {
      if (sinks.size() < 2) continue;
      const int64_t begin = sinks[0]->slot.offset;
      const int64_t size = sinks.back()->slot.offset + sinks.back()->parameter.numel() - begin;
      Stretch& stretch = now.emplace_back();
      stretch.weight = street.flat.narrow(0, begin, size);
      stretch.gradient = bucket.gradient.narrow(0, begin, size);
      for (const Sink* sink : sinks)
        stretch.members.push_back({sink->parameter, 0, sink->slot.offset - begin, sink->parameter.numel()});
    }
  }
  return stretches_.renew(std::move(now));
}

}  // namespace plumb

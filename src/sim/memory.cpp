// Aliases, byte ranges, and the copies between host and device.
#include "sim/memory.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>

#include "sim/allocator.h"
#include "sim/machine.h"

namespace plumb::sim {
namespace {

// A tensor of more runs than this is taken as its whole span.
constexpr int64_t max_runs = 4096;

char* data_of(const at::Tensor& tensor) {
  auto* base = static_cast<char*>(tensor.storage().unsafeGetStorageImpl()->mutable_data());
  return base ? base + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) : nullptr;
}

void order_streams(int waiter, int on) { Machine::get().wait(waiter, Machine::get().record(on)); }

}  // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  char* data = data_of(tensor);
  const auto offset = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  const auto held = static_cast<int64_t>(tensor.storage().nbytes());
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(std::max<int64_t>(held - offset, 0)),
                       c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)), nullptr, /*resizable=*/false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

void add_ranges(std::vector<Range>& ranges, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  char* begin = data_of(tensor);
  const auto item = static_cast<int64_t>(tensor.itemsize());
  if (tensor.is_contiguous()) {
    ranges.push_back({begin, begin + tensor.numel() * item, write});
    return;
  }
  struct Dimension {
    int64_t stride, size;
  };
  std::vector<Dimension> dimensions;  // innermost first
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) > 0) dimensions.push_back({tensor.stride(d), tensor.size(d)});
  }
  std::sort(dimensions.begin(), dimensions.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  int64_t run = 1, runs = 1, span = 1;
  size_t outer = 0;  // dimensions before this one lie within one run
  for (; outer < dimensions.size() && dimensions[outer].stride <= run; ++outer) {
    run += dimensions[outer].stride * (dimensions[outer].size - 1);
  }
  for (const auto& [stride, size] : dimensions) span += stride * (size - 1);
  for (size_t d = outer; d < dimensions.size(); ++d) runs *= dimensions[d].size;
  if (runs > max_runs) {
    ranges.push_back({begin, begin + span * item, write});
    return;
  }
  const size_t first = ranges.size();
  ranges.push_back({begin, begin + run * item, write});
  for (size_t d = outer; d < dimensions.size(); ++d) {
    const size_t count = ranges.size() - first;
    for (int64_t i = 1; i < dimensions[d].size; ++i) {
      const int64_t shift = i * dimensions[d].stride * item;
      for (size_t k = 0; k < count; ++k) {
        const Range base = ranges[first + k];
        ranges.push_back({base.begin + shift, base.end + shift, write});
      }
    }
  }
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const bool plain = to.scalar_type() == from.scalar_type() && to.is_conj() == from.is_conj() &&
                     to.is_neg() == from.is_neg() && to.sizes() == from.sizes();
  if (plain && to.strides() == from.strides() && to.is_non_overlapping_and_dense()) {
    if (to.numel()) std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const int before = std::exchange(place().device, device);
  auto tensor = at::detail::empty_strided_generic(sizes, strides, allocator(),
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  place().device = before;
  return tensor;
}

const at::Tensor& resize_tensor(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const size_t need = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (c10::multiply_integers(sizes) && need > self.storage().nbytes()) resize_storage(self.storage(), need);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Contiguous) impl->empty_tensor_restride(*format);
  return self;  // NOLINT(bugprone-return-const-ref-from-parameter): as libtorch has it
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool device_from = on_sim(from), device_to = on_sim(to);
  const int device = (device_from ? from : to).device().index();
  static const auto labels = [] {
    const auto lock = Machine::lock();
    return std::array{intern("copy_"), intern("copy to the device"), intern("copy to the host")};
  }();
  const Label label = labels[device_from && device_to ? 0 : device_to ? 1 : 2];
  // From pageable memory the copy is staged during the call; pinned memory is read when the stream gets there.
  const bool reads_host_later = !device_from && non_blocking && is_pinned(from.storage().data());
  const bool writes_host_later = !device_to && non_blocking;
  at::Tensor source = device_from ? cpu_alias(from) : reads_host_later ? from : from.clone();
  at::Tensor target = device_to ? cpu_alias(to) : to;
  std::vector<Range> ranges;
  if (device_from || reads_host_later) add_ranges(ranges, from, false);
  if (device_to || writes_host_later) add_ranges(ranges, to, true);

  auto lock = Machine::lock();
  Machine& machine = Machine::get();
  const int stream = current_id(device);
  // As on CUDA, a copy between devices orders the current streams of both.
  const int peer = device_from && device_to && from.device() != to.device() ? current_id(to.device().index()) : stream;
  if (peer != stream) order_streams(stream, peer);
  machine.enqueue(stream, label, ranges, [source, target] { copy_values(target, source); });
  if (peer != stream) order_streams(peer, stream);
  if (reads_host_later) watch_host(from);
  if (writes_host_later) watch_host(to);
  if (!device_to && !non_blocking) machine.synchronize(stream, lock);
  return to;
}

}  // namespace plumb::sim

// Device tensors seen from the host: the bytes they touch, and CPU tensors over the same bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sim/shadow.h"

namespace plumb::sim {

inline bool on_sim(const at::Tensor& tensor) { return tensor.device().type() == c10::DeviceType::PrivateUse1; }

// A CPU tensor over the memory of `tensor`, which must outlive its use: device memory does, in stream order.
at::Tensor cpu_alias(const at::Tensor& tensor);

// Appends the runs of bytes that a strided tensor covers (its span, when there are very many).
void add_ranges(std::vector<Range>& ranges, const at::Tensor& tensor, bool write);

// to = from for tensors of the same shape, bytewise where possible.
void copy_values(const at::Tensor& to, const at::Tensor& from);

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// aten::_copy_from: between devices, and between host and device.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);
const at::Tensor& resize_tensor(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format);

// Watches host memory that a stream reads or writes past the call; torch's own CPU operations on it are then checked.
// The machine's lock is held.
void watch_host(const at::Tensor& cpu_tensor);
bool is_pinned(const void* pointer);
c10::Allocator* pinned_allocator();
void reset_host_watch();

}  // namespace plumb::sim

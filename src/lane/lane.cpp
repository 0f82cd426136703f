#include "lane/lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef PLUMB_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>

namespace plumb {
namespace {

using Guard = c10::impl::VirtualGuardImpl;

bool capturing(const c10::Stream& stream) {
#ifdef PLUMB_CUDA
  if (stream.device_type() != c10::DeviceType::CUDA) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status));
  return status != cudaStreamCaptureStatusNone;
#else
  (void)stream;
  return false;
#endif
}

}  // namespace

c10::Stream current_stream(c10::Device device) { return Guard(device.type()).getStream(device); }

void LaneSet::add(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = current_stream(device);
  auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& known) { return known.stream == stream; });
  if (lane == lanes_.end()) lane = lanes_.insert(lanes_.end(), Lane{stream, c10::Event(device.type())});
  lane->recorded = false;
}

void LaneSet::join(c10::Device device) {
  if (lanes_.empty()) return;
  const c10::Stream stream = current_stream(device);
  for (Lane& lane : lanes_) {
    if (lane.stream == stream) continue;
    const bool captured = capturing(lane.stream);
    if (!captured && capturing(stream)) continue;
    if (!lane.recorded || lane.captured != captured) lane.event.record(lane.stream);
    lane.recorded = true;
    lane.captured = captured;
    lane.event.block(stream);
  }
}

void LaneSet::follow(c10::Device device) {
  if (lanes_.empty()) return;
  const c10::Stream stream = current_stream(device);
  c10::Event now(device.type());
  for (Lane& lane : lanes_) {
    if (lane.stream == stream || (capturing(stream) && !capturing(lane.stream))) continue;
    if (!now.was_marked_for_recording()) now.record(stream);
    now.block(lane.stream);
  }
}

void LaneSet::keep(const c10::DataPtr& memory) const {
  for (const Lane& lane : lanes_) Guard(lane.stream.device_type()).recordDataPtrOnStream(memory, lane.stream);
}

void Lanes::begin_part(c10::Device device) { all_.join(device); }

void Lanes::end_part(c10::Device device) { parts_.add(device); }

void Lanes::begin_all(c10::Device device) {
  all_.join(device);
  parts_.join(device);
}

void Lanes::end_all(c10::Device device) {
  parts_.clear();
  all_.clear();
  all_.add(device);
}

void Lanes::keep(const c10::DataPtr& memory) const {
  parts_.keep(memory);
  all_.keep(memory);
}

bool capturing(c10::Device device) { return !device.is_cpu() && capturing(current_stream(device)); }

void keep_for_current(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  if (tensor.is_sparse()) {
    keep_for_current(tensor._indices());
    return keep_for_current(tensor._values());
  }
  if (!tensor.has_storage()) return;
  const c10::Device device = tensor.device();
  Guard(device.type()).recordDataPtrOnStream(tensor.storage().data_ptr(), current_stream(device));
}

}  // namespace plumb

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

GraphOf asked = nullptr;

// The graph that the stream's work is captured into; 0: it runs.
uint64_t graph_of(const c10::Stream& stream) {
  if (asked != nullptr) return asked(stream);
#ifdef PLUMB_CUDA
  if (stream.device_type() != c10::DeviceType::CUDA) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;  // NOLINT(google-runtime-int): CUDA's own type
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::CUDAStream(stream).stream(), &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id + 1;
#else
  return 0;
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
  for (Lane& lane : lanes_) wait(stream, lane);
}

void LaneSet::join(c10::Device device, const c10::Stream& other) {
  for (Lane& lane : lanes_) {
    if (lane.stream == other) wait(current_stream(device), lane);
  }
}

void LaneSet::wait(const c10::Stream& stream, Lane& lane) {
  if (lane.stream == stream) return;
  const uint64_t graph = graph_of(lane.stream);
  if (graph == 0 && graph_of(stream) != 0) return;
  if (!lane.recorded || lane.graph != graph) lane.event.record(lane.stream);
  lane.recorded = true;
  lane.graph = graph;
  lane.event.block(stream);
}

void LaneSet::follow(c10::Device device) {
  if (lanes_.empty()) return;
  const c10::Stream stream = current_stream(device);
  c10::Event now(device.type());
  for (Lane& lane : lanes_) {
    if (lane.stream == stream || (graph_of(stream) != 0 && graph_of(lane.stream) == 0)) continue;
    if (!now.was_marked_for_recording()) now.record(stream);
    now.block(lane.stream);
  }
}

void LaneSet::keep(const c10::DataPtr& memory) const {
  for (const Lane& lane : lanes_) Guard(lane.stream.device_type()).recordDataPtrOnStream(memory, lane.stream);
}

void Lanes::begin_part(c10::Device device) { all_.join(device); }

void Lanes::end_part(c10::Device device) { parts_.add(device); }

void Lanes::begin_part(c10::Device device, int place) {
  begin_part(device);
  if (const auto last = last_.find(place); last != last_.end()) parts_.join(device, last->second);
}

void Lanes::end_part(c10::Device device, int place) {
  end_part(device);
  if (!device.is_cpu()) last_.insert_or_assign(place, current_stream(device));
}

void Lanes::begin_all(c10::Device device) {
  all_.join(device);
  parts_.join(device);
}

void Lanes::end_all(c10::Device device) {
  last_.clear();
  parts_.clear();
  all_.clear();
  all_.add(device);
}

void Lanes::keep(const c10::DataPtr& memory) const {
  parts_.keep(memory);
  all_.keep(memory);
}

void ask_about_graphs(GraphOf graph_of) { asked = graph_of; }

bool capturing(c10::Device device) { return !device.is_cpu() && graph_of(current_stream(device)) != 0; }

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

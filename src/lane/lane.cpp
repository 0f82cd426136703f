#include "lane/lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace plumb {

void Producers::wrote(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& known) { return known.stream == stream; });
  if (lane == lanes_.end()) lane = lanes_.insert(lanes_.end(), Lane{stream, c10::Event(device.type())});
  lane->event.record(stream);
}

void Producers::join(c10::Device device) {
  if (lanes_.empty()) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (Lane& lane : lanes_) {
    if (lane.stream != stream) lane.event.block(stream);
  }
}

}  // namespace plumb

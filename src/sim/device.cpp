// The device guard and hooks of the simulated accelerator.
#include "sim/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "sim/allocator.h"
#include "sim/machine.h"
#include "sim/memory.h"

namespace plumb::sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

int index_of(Device device) { return device.index() < 0 ? place().device : device.index(); }

int choose(int device) {
  place().chose_device = true;
  return std::exchange(place().device, device);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return device_type; }
  Device exchangeDevice(Device device) const override {
    return {device_type, static_cast<DeviceIndex>(choose(index_of(device)))};
  }
  Device getDevice() const override { return {device_type, static_cast<DeviceIndex>(place().device)}; }
  void setDevice(Device device) const override { choose(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { choose(index_of(device)); }
  // Autograd sizes its threads by the first answer it gets, so it is the most there can be.
  DeviceIndex deviceCount() const noexcept override { return max_devices; }

  Stream getStream(Device device) const override {
    return make_stream(index_of(device), place().current[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return make_stream(index_of(device), 0); }
  Stream getNewStream(Device device, int /*priority*/) const override {
    const auto lock = Machine::lock();
    return Machine::get().add_stream(index_of(device), "");
  }
  Stream getStreamFromGlobalPool(Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const int device = stream.device_index();
    return make_stream(device, std::exchange(place().current[device], stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    const auto lock = Machine::lock();
    Machine& machine = Machine::get();
    machine.step_if_mine();
    return learn_if_passed(machine.record(machine.id_of(stream)));
  }
  void synchronizeStream(const Stream& stream) const override {
    auto lock = Machine::lock();
    Machine::get().synchronize(Machine::get().id_of(stream), lock);
  }
  void synchronizeDevice(DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const Stream& stream, DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {
    const auto lock = Machine::lock();
    ++Machine::get().statistics.events;
    if (!*event) *event = new EventState;
    *static_cast<EventState*>(*event) = Machine::get().record(Machine::get().id_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    const auto lock = Machine::lock();
    ++Machine::get().statistics.stream_waits;
    Machine::get().wait(Machine::get().id_of(stream), *static_cast<EventState*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto lock = Machine::lock();
    Machine::get().step_if_mine();
    return learn_if_passed(*static_cast<EventState*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto lock = Machine::lock();
    Machine::get().synchronize_event(*static_cast<EventState*>(event), lock);
  }
  void destroyEvent(void* event, DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    record_stream(memory, stream);
  }

 private:
  // A host that saw an event passed knows all that came before it.
  static bool learn_if_passed(const EventState& event) {
    Machine& machine = Machine::get();
    if (event.stream < 0 || event.generation != machine.generation()) return true;
    if (!machine.passed(event)) return false;
    machine.host_learns(machine.host_of(machine.device_of(event.stream)), event.clock);
    return true;
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { choose(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(place().device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return static_cast<DeviceIndex>(choose(device)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(device < 0 ? place().device : choose(device));
  }
  // The CPU's generator serves the device too, so that random operations have the CPU's bits.
  const at::Generator& getDefaultGenerator(DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void* /*pointer*/) const override {
    return {device_type, static_cast<DeviceIndex>(place().device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

const c10::impl::DeviceGuardImplInterface* device_guard() {
  static auto* const guard = new Guard;
  return guard;
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

c10::Device device(int index) { return {device_type, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream new_stream(int device_index, const std::string& name) {
  const auto lock = Machine::lock();
  return Machine::get().add_stream(device_index, name);
}

c10::Stream current_stream(int device_index) { return make_stream(device_index, place().current[device_index]); }

void wait_for(c10::Stream waiter, c10::Stream on) {
  const auto lock = Machine::lock();
  Machine& machine = Machine::get();
  machine.wait(machine.id_of(waiter), machine.record(machine.id_of(on)));
}

void synchronize(int device_index) {
  auto lock = Machine::lock();
  Machine& machine = Machine::get();
  for (int index = 0; index < machine.streams_of(device_index); ++index) {
    machine.synchronize(machine.id_of(device_index, index), lock);
  }
}

}  // namespace plumb::sim

#include "engine/slots.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>

namespace plumb {
namespace {

struct Spelling {
  at::ScalarType dtype;
  const char* name;
};
constexpr Spelling kSpellings[] = {
    {at::kDouble, "F64"},          {at::kFloat, "F32"},        {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},       {at::kLong, "I64"},         {at::kInt, "I32"},
    {at::kShort, "I16"},           {at::kChar, "I8"},          {at::kByte, "U8"},
    {at::kBool, "BOOL"},           {at::kUInt16, "U16"},       {at::kUInt32, "U32"},
    {at::kUInt64, "U64"},          {at::kComplexFloat, "C64"}, {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e5m2, "F8_E5M2"},
};

// All elements in the order of memory; undefined where there are gaps between them, or other numbers lie there.
at::Tensor flat_of(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach();
  if (!plain.is_non_overlapping_and_dense() || plain.is_conj() || plain.is_neg()) return {};
  return plain.as_strided({plain.numel()}, {1}, plain.storage_offset());
}

SavedSlot whole_slot(save::Kind kind, const std::string& name, const at::Tensor& tensor) {
  SavedSlot slot;
  slot.kind = kind;
  slot.name = name;
  slot.owner = tensor;
  slot.memory = flat_of(tensor);
  slot.end = tensor.numel();
  return slot;
}

}  // namespace

std::string dtype_name(at::ScalarType dtype, const std::string& what) {
  for (const Spelling& one : kSpellings) {
    if (one.dtype == dtype) return one.name;
  }
  throw Error(c10::str(what, " is ", dtype, ", which a checkpoint cannot hold"));
}

at::ScalarType dtype_of(const std::string& name) {
  for (const Spelling& one : kSpellings) {
    if (name == one.name) return one.dtype;
  }
  throw Error("this libtorch has no dtype " + name);
}

std::vector<int64_t> SavedSlot::strides() const {
  if (owner.is_contiguous() || !owner.is_non_overlapping_and_dense() || owner.is_conj() || owner.is_neg()) return {};
  return owner.strides().vec();
}

std::map<std::string, int64_t> updates_of(Engine::Impl& impl) {
  std::map<std::string, int64_t> updates;
  for (const Sink& sink : impl.reducer->sinks()) {
    if (const int64_t count = impl.updater->memory_of(sink).updates; count > 0) updates[sink.name] = count;
  }
  return updates;
}

std::vector<SavedSlot> slots_of(Engine::Impl& impl, const std::map<std::string, int64_t>& updates) {
  impl.updater->bring_home(impl.reducer->buckets());
  std::vector<SavedSlot> slots;
  std::map<std::string, const Sink*> sinks;
  for (const Sink& sink : impl.reducer->sinks()) sinks[sink.name] = &sink;
  for (const auto& [name, parameter] : impl.parameters) {
    const auto found = sinks.find(name);
    if (found == sinks.end() || !impl.units || !impl.units->owns(parameter)) {
      slots.push_back(whole_slot(save::Kind::weight, name, parameter));
      continue;
    }
    const Sink& sink = *found->second;
    const Bucket& bucket = impl.reducer->layout().of(sink);
    const Range mine = overlap(sink.slot, parameter.numel(), bucket.held);
    SavedSlot& slot = slots.emplace_back();
    slot.name = name;
    slot.owner = parameter;
    slot.memory = bucket.parameter.narrow(0, std::clamp<int64_t>(mine.begin - bucket.held.begin, 0, bucket.held.size()),
                                          mine.size());
    slot.begin = std::clamp<int64_t>(mine.begin - sink.slot.offset, 0, parameter.numel());
    slot.end = slot.begin + mine.size();
    slot.sharded = true;
  }
  for (const auto& [name, parameter] : impl.parameters) {
    const auto found = sinks.find(name);
    const auto count = updates.find(name);
    if (found == sinks.end() || count == updates.end() || count->second == 0) continue;
    const Sink& sink = *found->second;
    const Bucket& bucket = impl.reducer->layout().of(sink);
    const Range mine = overlap(sink.slot, parameter.numel(), bucket.updated);
    const Updater::Memory memory = impl.updater->memory_of(sink);
    for (const auto& [key, tensor] : {std::pair("master", memory.master), std::pair("momentum", memory.momentum),
                                      std::pair("mean", memory.mean), std::pair("square", memory.square)}) {
      if (!tensor.defined()) continue;
      SavedSlot& slot = slots.emplace_back();
      slot.kind = save::Kind::optimizer;
      slot.name = name;
      slot.key = key;
      slot.owner = parameter;
      slot.memory = tensor;
      slot.begin = std::clamp<int64_t>(mine.begin - sink.slot.offset, 0, parameter.numel());
      slot.end = slot.begin + mine.size();
      slot.sharded = impl.reducer->shards(impl.reducer->row().state);
    }
  }
  for (const auto& [name, buffer] : impl.buffers) {
    if (buffer.defined()) slots.push_back(whole_slot(save::Kind::buffer, name, buffer));
  }
  return slots;
}

std::vector<at::Generator> saved_generators() {
  std::vector<at::Generator> all = {at::detail::getDefaultCPUGenerator()};
  if (!at::hasCUDA()) return all;
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.deviceCount() > 0) {
    all.push_back(at::globalContext().defaultGenerator(
        at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(hooks.getCurrentDevice()))));
  }
  return all;
}

}  // namespace plumb

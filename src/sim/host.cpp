// Host memory that streams read or write: pinned memory, and the check of the host's own accesses to it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <optional>

#include "plumb/sim.h"
#include "sim/machine.h"
#include "sim/memory.h"

namespace plumb::sim {
namespace {

struct HostMemory {
  std::map<const char*, const char*> pinned;  // begin to end
  // Kept alive while watched, so that an address means one tensor.
  std::map<char*, at::Tensor> watched;
  std::optional<at::CallbackHandle> callback;
};

HostMemory& memory() {
  static auto* const memory = new HostMemory;
  return *memory;
}

thread_local bool checking = false;

void check(const at::Tensor& tensor, bool write, const char* operation) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage())
    return;
  const auto lock = Machine::lock();
  std::vector<Range> touched;
  add_ranges(touched, tensor, write);
  if (touched.empty()) return;
  for (const auto& [begin, watched] : memory().watched) {
    const char* end = begin + watched.storage().nbytes();
    for (const Range& range : touched) {
      if (range.begin >= end || range.end <= begin) continue;
      Machine::get().note_host(Machine::get().host_of(place().device), intern(operation), range);
    }
  }
}

// Sees every operation that torch dispatches on this thread, the simulator's own kernels excepted.
std::unique_ptr<at::ObserverContext> on_operation(const at::RecordFunction& function) {
  if (checking || memory().watched.empty() || place().in_kernel) return nullptr;
  checking = true;
  const auto schema = function.operator_schema();
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool write = schema && i < schema->arguments().size() && schema->arguments()[i].alias_info() &&
                       schema->arguments()[i].alias_info()->isWrite();
    if (inputs[i].isTensor()) {
      check(inputs[i].toTensor(), write, function.name());
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) check(tensor, write, function.name());
    }
  }
  checking = false;
  return nullptr;
}

void unpin(void* pointer) {
  {
    const auto lock = Machine::lock();
    memory().pinned.erase(static_cast<char*>(pointer));
  }
  c10::GetCPUAllocator()->raw_deallocate(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::GetCPUAllocator()->raw_allocate(bytes);
    if (pointer) {
      const auto lock = Machine::lock();
      memory().pinned[static_cast<char*>(pointer)] = static_cast<char*>(pointer) + bytes;
    }
    return {pointer, pointer, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

bool is_pinned(const void* pointer) {
  const auto lock = Machine::lock();
  auto it = memory().pinned.upper_bound(static_cast<const char*>(pointer));
  return it != memory().pinned.begin() && pointer < std::prev(it)->second;
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

void watch_host(const at::Tensor& cpu_tensor) {
  memory().watched[static_cast<char*>(cpu_tensor.storage().unsafeGetStorageImpl()->mutable_data())] = cpu_tensor;
  if (!memory().callback) {
    memory().callback = at::addGlobalCallback(
        at::RecordFunctionCallback(&on_operation).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
}

void reset_host_watch() {
  memory().watched.clear();
  if (memory().callback) at::removeCallback(*std::exchange(memory().callback, std::nullopt));
}

void host_reads(const at::Tensor& cpu_tensor) { check(cpu_tensor, false, "the host's read"); }
void host_writes(const at::Tensor& cpu_tensor) { check(cpu_tensor, true, "the host's write"); }

}  // namespace plumb::sim

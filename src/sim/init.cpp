// Turning the simulator on, naming memory, own kernels, and running ranks.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <thread>

#include "sim/allocator.h"
#include "sim/device.h"
#include "sim/machine.h"
#include "sim/memory.h"
#include "sim/ops.h"

namespace plumb::sim {
namespace {

std::atomic<int> devices{0};

void turn_on() {
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(device_type, allocator());
  static const c10::impl::DeviceGuardImplRegistrar registrar(device_type, device_guard());
  register_hooks();
  register_kernels();
  const auto lock = Machine::lock();
  Machine::get().on_reset = {reset_allocator, reset_host_watch};
}

}  // namespace

int device_count() { return devices; }
bool initialised() { return devices > 0; }

void init(int wanted) {
  if (wanted < 1 || wanted > max_devices) {
    throw Error("sim::init was asked for " + std::to_string(wanted) + " devices; it makes 1 to " +
                std::to_string(max_devices));
  }
  static std::once_flag once;
  std::call_once(once, turn_on);
  const auto lock = Machine::lock();
  const bool first = devices == 0;
  devices = std::max<int>(devices, wanted);
  if (first) Machine::get().reset(0);
}

void name(const at::Tensor& tensor, const std::string& name) {
  std::vector<Range> ranges;
  add_ranges(ranges, tensor, false);
  const auto lock = Machine::lock();
  if (ranges.empty()) return;
  char* end = ranges.front().end;
  for (const Range& range : ranges) end = std::max(end, range.end);
  Machine::get().names.set(ranges.front().begin, end, name);
}

void launch(const std::string& name, const Tensors& reads, const Tensors& writes,
            const std::function<void(const Tensors&, const Tensors&)>& kernel) {
  std::vector<Range> ranges;
  Tensors read_aliases, write_aliases;
  int device = -1;
  const auto take = [&](const Tensors& tensors, Tensors& aliases, bool write) {
    for (const at::Tensor& tensor : tensors) {
      if (!on_sim(tensor) || (device >= 0 && tensor.device().index() != device)) {
        throw Error("sim::launch of '" + name + "' takes tensors of one simulated device; one is on " +
                    tensor.device().str());
      }
      device = tensor.device().index();
      add_ranges(ranges, tensor, write);
      aliases.push_back(cpu_alias(tensor));
    }
  };
  take(reads, read_aliases, false);
  take(writes, write_aliases, true);
  const auto lock = Machine::lock();
  Machine::get().enqueue(current_id(device < 0 ? place().device : device), intern(name), ranges,
                         [=] { kernel(read_aliases, write_aliases); });
}

void run_ranks(int n, const std::function<void(int)>& body) {
  if (n < 1 || n > device_count()) {
    throw Error("sim::run_ranks was asked for " + std::to_string(n) + " ranks; there are " +
                std::to_string(device_count()) + " devices, and each rank needs its own: call init(" +
                std::to_string(n) + ")");
  }
  Machine& machine = Machine::get();
  {
    const auto lock = Machine::lock();
    if (machine.has_ranks()) throw Error("sim::run_ranks was called inside another; run them one after the other");
    machine.begin_ranks(n);
  }
  std::vector<std::exception_ptr> thrown(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      at::init_num_threads();  // OpenMP counts per thread
      place().rank = place().device = rank;
      {
        auto lock = Machine::lock();
        machine.take_turn(rank, lock);
      }
      try {
        body(rank);
        synchronize(rank);
      } catch (...) {
        thrown[rank] = std::current_exception();
      }
      const auto lock = Machine::lock();
      machine.end_rank(rank);
    });
  }
  for (auto& thread : threads) thread.join();
  {
    const auto lock = Machine::lock();
    machine.end_ranks();
  }
  for (const auto& error : thrown) {
    if (error) std::rethrow_exception(error);
  }
}

void wait_until(const std::function<bool()>& ready, const std::string& what) {
  auto lock = Machine::lock();
  Machine::get().run_until(place().device, lock, ready, what);
}

Outside::Outside() {
  const auto lock = Machine::lock();
  if (!Machine::get().has_ranks()) return;
  rank_ = Machine::get().host_of(place().device);
  Machine::get().leave(rank_);
}

Outside::~Outside() {
  if (rank_ < 0) return;
  auto lock = Machine::lock();
  Machine::get().come_back(rank_, lock);
}

}  // namespace plumb::sim

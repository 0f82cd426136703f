#include "engine/filling.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "engine/host_memory.h"
#include "engine/saving.h"
#include "engine/together.h"
#include "watch/road.h"

namespace plumb {
namespace {

constexpr size_t kReaders = 4;     // threads: more do not make a disk faster
constexpr size_t kRun = 32 << 20;  // bytes that one of them reads, one behind the other

void copy_into(const SavedSlot& slot, const at::Tensor& value) {
  // A buffer that was made under InferenceMode can be written only there.
  std::optional<c10::InferenceMode> mode;
  if (slot.owner.is_inference()) mode.emplace();
  if (slot.memory.defined()) {
    slot.memory.copy_(value);
  } else {
    slot.owner.detach().copy_(value.view(slot.owner.sizes()));
  }
}

}  // namespace

std::string title_of(save::Kind kind, const std::string& name, const std::string& key) {
  save::SavedTensor tensor;
  tensor.kind = kind;
  tensor.name = name;
  tensor.key = key;
  return tensor.title();
}

std::string title_of(const SavedSlot& slot) { return title_of(slot.kind, slot.name, slot.key); }

std::string begin_loading(Engine::Impl& impl, const Where& where, const std::string& refusal,
                          const std::function<std::string()>& choose) {
  impl.reducer->serve_gathers(where);
  const Outcome mine = attempt([&] {
    road_of(impl.world).pass(Point::load);
    impl.reducer->check_between_steps(where.detail, Reducer::Cleared::is_enough);
    if (impl.in_step) throw Error(where.detail + " inside of a step; end_step() ends it");
    if (!refusal.empty()) throw Error(refusal);
    if (impl.units) impl.units->begin_update();  // refuses while somebody uses a unit
    return impl.world.rank() == 0 ? choose() : "";
  });
  if (impl.units) impl.units->end_update();
  try {
    return share_outcome(impl.world, mine, where)[0];
  } catch (const RankFailed& failure) {
    throw Error(impl.world.rank(), failure.what());
  }
}

std::vector<std::string> on_every_rank(const World& world, std::function<std::string()> work, const Where& where) {
  try {
    // Where there are others, they hear from this rank while it works.
    const auto runs = world.size() > 1 ? Task::Runs::beside : Task::Runs::at_once;
    return *together(world, Task(std::move(work), runs), Wait::yes, where);
  } catch (const RankFailed& failure) {
    throw Error(world.rank(), failure.what());
  }
}

at::Tensor read_range(const save::Checkpoint& checkpoint, const save::SavedTensor& tensor, int64_t begin, int64_t end) {
  const at::Tensor value = host_memory(end - begin, dtype_of(tensor.dtype));
  checkpoint.read(tensor, begin, end, value.mutable_data_ptr());
  return value;
}

void Reads::share(int64_t bytes) {
  shared_ = bytes > 0 ? host_memory(bytes, at::kByte) : at::Tensor();
  taken_ = 0;
}

at::Tensor Reads::add(const save::SavedTensor& tensor, int64_t begin, int64_t end) {
  constexpr int64_t kAligned = 64;
  const at::ScalarType dtype = dtype_of(tensor.dtype);
  const int64_t bytes = (end - begin) * static_cast<int64_t>(c10::elementSize(dtype));
  at::Tensor memory;
  if (shared_.defined() && taken_ + bytes <= shared_.numel()) {
    memory = shared_.narrow(0, taken_, bytes).view(dtype);
    taken_ += (bytes + kAligned - 1) / kAligned * kAligned;
  } else {
    memory = host_memory(end - begin, dtype);
  }
  reads_.push_back({&tensor, begin, end, memory});
  return memory;
}

void Reads::run() {
  // In the order of the files, each thread a long run of them at a time: the system reads ahead of every one.
  std::stable_sort(reads_.begin(), reads_.end(), [](const Read& a, const Read& b) {
    const auto file = [](const Read& read) { return read.tensor->parts.empty() ? -1 : read.tensor->parts[0].file; };
    return std::pair(file(a), a.tensor) <
           std::pair(file(b), b.tensor);  // the manifest has them in the order of the file
  });
  std::mutex mutex;
  size_t next = 0;
  std::exception_ptr failure;
  size_t failed = reads_.size();
  const auto take_run = [&]() -> std::pair<size_t, size_t> {
    std::lock_guard lock(mutex);
    const size_t begin = next;
    for (size_t bytes = 0; next < failed && bytes < kRun; ++next) {
      const at::Tensor& memory = reads_[next].memory;
      bytes += memory.defined() ? memory.nbytes() : 0;
    }
    return {begin, next};
  };
  const auto work = [&] {
    for (auto [i, end] = take_run(); i < end; std::tie(i, end) = take_run()) {
      for (; i < end; ++i) {
        const Read& read = reads_[i];
        try {
          if (read.memory.defined()) {
            checkpoint_.read(*read.tensor, read.begin, read.end, read.memory.mutable_data_ptr());
          } else {
            checkpoint_.verify(*read.tensor);
          }
        } catch (...) {
          std::lock_guard lock(mutex);
          if (i < failed) {
            failed = i;
            failure = std::current_exception();
          }
          break;
        }
      }
    }
  };
  const size_t count = std::min({kReaders, reads_.size(), size_t{std::max(1u, std::thread::hardware_concurrency())}});
  std::vector<std::thread> others;
  for (size_t i = 1; i < count; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  reads_.clear();
  if (failure) std::rethrow_exception(failure);
}

void fill(Engine::Impl& impl, const std::vector<Filling>& fillings, const std::function<void()>& before) {
  at::NoGradGuard no_grad;
  std::deque<Bucket>& buckets = impl.reducer->buckets();
  for (const auto& [name, parameter] : impl.parameters) parameter.mutable_grad().reset();
  impl.scaler.forget();
  if (impl.units) impl.units->begin_update();
  for (Bucket& bucket : buckets) bucket.lanes.begin_all(bucket.device());
  road_of(impl.world).pass(Point::fill);
  if (impl.saving) impl.saving->settle();
  before();
  for (const Filling& filling : fillings) copy_into(filling.slot, filling.value);
  for (const Sink& sink : impl.reducer->sinks()) sink.parameter.unsafeGetTensorImpl()->bump_version();
  impl.updater->filled(buckets);
  for (Bucket& bucket : buckets) bucket.lanes.end_all(bucket.device());
  if (impl.units) impl.units->end_update();
  impl.reducer->remember_parameters();
}

}  // namespace plumb

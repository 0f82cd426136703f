// The counting allocator: libtorch's own, with a sum.
#include "cli/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <unordered_set>

#include "engine/impl.h"
#include "unit/door.h"

namespace plumb::cli {

namespace {

std::atomic<int64_t> living{0};

// The memory's own address is its context, as libtorch's CPU libraries expect of a raw allocation; the size is asked of
// malloc when it is given back.
void give_back(void* memory) {
  if (memory == nullptr) return;
  living -= static_cast<int64_t>(malloc_usable_size(memory));
  c10::free_cpu(memory);
}

class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::alloc_cpu(bytes);
    if (memory != nullptr) living += static_cast<int64_t>(malloc_usable_size(memory));
    return {memory, memory, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

void walk(const torch::nn::Module& module, int64_t& around, ModelShape& shape) {
  int64_t inside = 0;
  const bool is_unit = unit::find_door(&module) != nullptr;
  int64_t& mine = is_unit ? inside : around;
  for (const auto& parameter : module.parameters(/*recurse=*/false)) {
    mine += parameter.numel();
    shape.largest = std::max(shape.largest, parameter.numel());
  }
  for (const auto& child : module.children()) walk(*child, mine, shape);
  if (inside > 0) shape.units.push_back(inside);
}

}  // namespace

void count_tensors() {
  static auto* allocator = new Counting;  // never destroyed: tensors may outlive main
  c10::SetCPUAllocator(allocator, /*priority=*/1);
}

int64_t tensor_bytes() { return living.load(); }

int64_t uncounted_bytes(Engine& engine) {
  std::unordered_set<const void*> seen;
  int64_t bytes = 0;
  for (const Bucket& bucket : engine.impl().reducer->buckets()) {
    for (const at::Tensor* tensor : {&bucket.gradient, &bucket.parameter, &bucket.incoming.sum}) {
      if (!tensor->defined() || tensor->storage().data_ptr().get_deleter() == &give_back) continue;
      if (seen.insert(tensor->storage().unsafeGetStorageImpl()).second) {
        bytes += static_cast<int64_t>(tensor->storage().nbytes());
      }
    }
  }
  return bytes;
}

ModelShape shape_of(const torch::nn::Module& model) {
  ModelShape shape;
  walk(model, shape.others, shape);
  return shape;
}

}  // namespace plumb::cli

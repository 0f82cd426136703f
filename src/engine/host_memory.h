// Memory of the host for what comes from a device or a disk, or goes there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace plumb {

// Uninitialized. Large memory is of large pages, where the system has them: touching it for the first time costs little.
at::Tensor host_memory(int64_t elements, at::ScalarType dtype);

// What a rank's state was at one moment. The memory of the copies is kept from one to the next: copying is all it costs.
class Snapshot {
 public:
  // Puts a copy in the place of each (flat, on any device). Those of the call before are overwritten.
  void take(const std::vector<at::Tensor*>& tensors);

 private:
  at::Tensor memory_;
};

}  // namespace plumb

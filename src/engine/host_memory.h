// Memory of the host for what comes from a device or a disk, or goes there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace plumb {

// Uninitialized. Large memory is of large pages, where the system has them: touching it for the first time costs little.
at::Tensor host_memory(int64_t elements, at::ScalarType dtype);

}  // namespace plumb

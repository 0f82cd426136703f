// NCCL groups: the real ones where the build found NCCL, a clear refusal elsewhere.
#include "backend/nccl.h"

#include "plumb/error.h"

#ifdef PLUMB_NCCL

#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace plumb {

bool has_nccl() { return true; }

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            int local_rank, std::chrono::milliseconds timeout) {
  const int devices = c10::cuda::device_count();
  if (local_rank >= devices) {
    throw Error(rank, "local rank " + std::to_string(local_rank) + " has no GPU of its own: this machine shows " +
                          std::to_string(devices) + "; start at most that many ranks here, or use the gloo backend");
  }
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(local_rank));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  group->setBoundDeviceId(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)));
  return group;
}

}  // namespace plumb

#else

namespace plumb {

bool has_nccl() { return false; }

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int rank, int, int,
                                            std::chrono::milliseconds) {
  throw Error(rank,
              "backend 'nccl' was asked for, and this build has no NCCL; build against a torch with CUDA (and "
              "nccl.h on the include path), or choose the gloo backend");
}

}  // namespace plumb

#endif

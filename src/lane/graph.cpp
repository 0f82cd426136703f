#include "lane/graph.h"

#include "plumb/error.h"

#ifdef PLUMB_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace plumb {

#ifdef PLUMB_CUDA

struct Graph::Impl {
  explicit Impl(c10::Device device) : on(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}
  c10::cuda::CUDAStreamGuard on;
  at::cuda::CUDAGraph graph;
  bool recorded = false;
};

void Graph::record(const std::function<void()>& work) {
  c10::cuda::device_synchronize();  // what ran before on other streams has ended
  impl_->graph.capture_begin();
  try {
    work();
  } catch (...) {
    try {
      impl_->graph.capture_end();
    } catch (...) {  // a capture that work() broke ends with that error, too
    }
    throw;
  }
  impl_->graph.capture_end();
  impl_->recorded = true;
}

void Graph::replay() { impl_->graph.replay(); }

#else

struct Graph::Impl {
  explicit Impl(c10::Device) {}
  bool recorded = false;
};

void Graph::record(const std::function<void()>&) {}
void Graph::replay() {}

#endif

Graph::Graph(c10::Device device) {
#ifndef PLUMB_CUDA
  throw Error(
      "this build records no graphs: the libtorch that it was built against has no CUDA, or CUDA was left out "
      "(PLUMB_WITH_CUDA)");
#endif
  if (!device.is_cuda()) throw Error("device '" + device.str() + "' has no graphs to record; only cuda has");
  impl_ = std::make_unique<Impl>(device);
}

Graph::~Graph() = default;
bool Graph::recorded() const { return impl_->recorded; }

}  // namespace plumb

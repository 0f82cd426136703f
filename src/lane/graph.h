// A graph: device work that was recorded once, to be replayed without the host's part in it.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace plumb {

class Graph {
 public:
  // Takes a stream of the device, which is this thread's current one until the graph ends. Throws Error where the device, or this
  // build, has no graphs.
  explicit Graph(c10::Device device);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Runs `work` on the host, and none of it on the device. The memory it allocates is the graph's.
  void record(const std::function<void()>& work);
  bool recorded() const;
  // On the device, what was recorded: it reads and writes the same memory.
  void replay();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plumb

// The collectives the engine speaks, over one c10d backend, asynchronous and guarded by the watch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plumb/world.h"

namespace c10d {
class Work;
}

namespace plumb {

// Where a rank stands in its program, for error reports: "backward 2 of step 5".
struct Where {
  enum class Kind { setup, backward, step, rebuild } kind = Kind::setup;
  int64_t step = 0;  // steps finished
  int64_t pass = 0;  // backwards begun since then
  std::string detail;  // what exactly, for humans: "reduction of bucket 3"
};

class Watch;

// A collective under way. `wait` returns when its result may be used: on the CPU it has arrived; on a device the
// current stream waits for it. Throws Error naming the ranks that did not come.
class Pending {
 public:
  Pending() = default;  // already done
  Pending(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Watch> watch, std::vector<at::Tensor> keep);
  ~Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  void wait(const Where& where);

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::shared_ptr<Watch> watch_;
  std::vector<at::Tensor> keep_;  // alive until the collective has ended
};

class Group {
 public:
  int rank() const;
  int size() const;

  // All take contiguous tensors and say so otherwise. Sums are over the ranks of the group, in place.
  Pending all_reduce(at::Tensor tensor);
  // full has size() equal parts; shard becomes the sum of everybody's part rank().
  Pending reduce_scatter(at::Tensor shard, at::Tensor full);
  Pending all_gather(at::Tensor full, at::Tensor shard);
  Pending broadcast(at::Tensor tensor, int root);

  // Memory that travels, from the backend where it offers its own.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  struct Impl;
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Group();  // of one rank

 private:
  std::shared_ptr<Impl> impl_;
};

// The groups of a world. `data` carries gradients on their device; `control` carries small host messages.
Group data_group(const World& world);
Group control_group(const World& world);

// Everybody's `mine` (the same length everywhere) in rank order. One small message over `control`.
std::vector<std::vector<int64_t>> exchange(const World& world, std::span<const int64_t> mine, const Where& where);
// Everybody's text in rank order; lengths may differ.
std::vector<std::string> exchange_text(const World& world, const std::string& mine, const Where& where);

}  // namespace plumb

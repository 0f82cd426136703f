// The collectives the engine speaks, over one c10d backend, asynchronous and guarded by the watch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plumb/strategy.h"
#include "plumb/world.h"
#include "watch/where.h"

namespace c10d {
class Work;
}

namespace plumb {

class Watch;
struct Ticket;

// A collective under way. `wait` returns when its result may be used: on the CPU it has arrived; on a device the
// current stream waits for it. Throws Error naming the ranks that did not come.
class Pending {
 public:
  Pending();  // already done
  // `finish`: what remains to be done on this rank once the work has ended. `arrival`: it ends not before.
  Pending(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Watch> watch, std::vector<at::Tensor> keep,
          std::shared_ptr<const Ticket> ticket, std::chrono::steady_clock::time_point arrival,
          std::function<void()> finish = {});
  ~Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  void wait(const Where& where);

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::shared_ptr<Watch> watch_;
  std::vector<at::Tensor> keep_;  // alive until the collective has ended
  std::shared_ptr<const Ticket> ticket_;
  std::chrono::steady_clock::time_point arrival_{};  // not before, where the link is shaped
  std::function<void()> finish_;
};

class Group {
 public:
  int rank() const;
  int size() const;

  // All take contiguous tensors and say so otherwise. Sums are over the ranks of the group, in place.
  Pending all_reduce(at::Tensor tensor);
  // full has size() equal parts; shard becomes the sum of everybody's part rank().
  Pending reduce_scatter(at::Tensor shard, at::Tensor full);
  // Several of them, on the host, as one message.
  struct Part {
    at::Tensor shard;
    at::Tensor full;
  };
  Pending reduce_scatter(const std::vector<Part>& parts);
  // Whether a message costs more than copying small ones together.
  bool messages_are_dear() const;
  Pending all_gather(at::Tensor full, at::Tensor shard);
  // full has size() equal parts; everybody's part rank(), in rank order.
  at::Tensor all_to_all(const at::Tensor& full, const Where& where);
  Pending broadcast(at::Tensor tensor, int root);

  // Whether ranks here say what they gather: then gather() pairs nobody with another's.
  bool names_gathers() const;
  // As all_gather of each part, as one message to every rank, on the host. `what`: a digest of what is gathered. Ranks that
  // say different things never fill each other's memory; they all get an error that says both.
  Pending gather(const std::vector<Part>& parts, int64_t what);

  // Everybody's `mine` (the same length everywhere) in rank order, in log₂ size() rounds; for host groups.
  std::vector<std::vector<int64_t>> exchange(std::span<const int64_t> mine, const Where& where);
  // What everybody said, combined on the way: by bit, whether somebody set it and whether everybody did; and the sums, the
  // same bits on every rank. In log₂ size() rounds, of a length that does not grow with size(); for host groups.
  struct Combined {
    std::vector<int64_t> any, every;
    std::vector<double> sums;
  };
  Combined combine(std::span<const int64_t> bits, std::span<const double> sums, const Where& where);

  // Every rank arrives before any leaves.
  Pending barrier();

  // Memory that travels, from the backend where it offers its own.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;
  bool owns_memory(c10::Device device) const;  // whether the backend offers its own there
  // Of tensors that the backend holds only until everybody has noticed that a collective has ended. Waits for nobody.
  void let_go() const;

  // Memory of every rank, the same length everywhere, to be read in place without asking while nobody writes it.
  // `everybody` is in rank order, and empty where ranks cannot read each other's memory. Collective.
  struct Shared {
    at::Tensor mine;
    std::vector<at::Tensor> everybody;
  };
  Shared share(int64_t numel, const at::TensorOptions& options, const Where& where);

  struct Impl;
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Group();  // of one rank

 private:
  std::shared_ptr<Impl> impl_;
};

// The groups of a world. `data` carries gradients on their device; `control` carries small host messages.
Group data_group(const World& world);
Group control_group(const World& world);

// Groups over the same ranks for one engine alone, so that the collectives of two engines never mix. Collective: every
// rank asks in the same order.
struct Groups {
  Group data;
  Group control;
  Group shard;          // the ranks that share this rank's replica, in the order of their parts
  Group replicate;      // the ranks that hold the same part, in the order of their replicas
  Group shard_control;  // small host messages among the ranks of `shard`
};
Groups new_groups(const World& world, const Mesh& mesh);

// Everybody's `mine` (the same length everywhere) in rank order. One small message over `control`.
std::vector<std::vector<int64_t>> exchange(const World& world, std::span<const int64_t> mine, const Where& where);
// Everybody's text in rank order; lengths may differ.
std::vector<std::string> exchange_text(const World& world, const std::string& mine, const Where& where);

// Tells the other ranks that this one fails with `what`: their waits end with an Error that names it. For an error
// that the world itself did not raise. Once is enough; after it, this world carries nothing more.
void report_failure(const World& world, const std::string& what, const Where& where);

}  // namespace plumb

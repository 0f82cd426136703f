// The ranks taking part: who I am, how many we are, and how we talk.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace plumb {

struct WorldOptions {
  // "shm", "tcp", "gloo", "nccl"; empty takes nccl when a CUDA device is asked for, shm when all ranks are processes of
  // one machine that can share memory, tcp otherwise.
  std::string backend{};
  // "cpu" or "cuda": where the gradients live. The rank's device index is its local rank.
  std::string device = "cpu";
  // How long a collective may wait for a rank before every waiting rank gets an error.
  std::chrono::milliseconds timeout{60'000};
};

// A value type over a shared implementation: copies are the same world.
class World {
 public:
  // A world of one: no sockets, no store.
  World();

  // Takes part in the world described by the environment of torchrun, mpirun or srun (RANK/WORLD_SIZE/…,
  // OMPI_COMM_WORLD_RANK/…, PMI_RANK/…, SLURM_PROCID/…, with MASTER_ADDR and MASTER_PORT for the rendezvous);
  // a world of one when none of them is set.
  static World join(const WorldOptions& options = {});

  // The same where the ranks have met already, at `store`, which serves nothing else under this prefix.
  static World join(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const WorldOptions& options = {});

  // Embeds communication that already exists. `store` serves error reports (who is waiting where); without one,
  // errors name what this rank knows.
  static World adopt(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                     const WorldOptions& options = {});

  int rank() const;
  int size() const;
  int local_rank() const;
  const std::string& backend() const;
  std::chrono::milliseconds timeout() const;

  // Every rank arrives before any leaves.
  void barrier() const;

  struct Impl;
  Impl& impl() const { return *impl_; }
  explicit World(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

// Runs `body` on `ranks` threads of this process, each with its own World over the `local` backend. Returns when all
// have ended; if any threw, throws the first rank's error that is not merely a consequence of another's.
void run_local(int ranks, const std::function<void(World)>& body, const WorldOptions& options = {});

}  // namespace plumb

// What a call of the `shm` backend returns: its wait moves the collectives of this rank on.
#pragma once

#include "backend/shm_ring.h"

namespace plumb {

class ShmWork final : public c10d::Work {
 public:
  // `last`: the number of the call's last piece.
  ShmWork(std::shared_ptr<ShmRing> ring, int rank, Verb verb, uint64_t last, std::chrono::milliseconds timeout);

  void end(const std::exception_ptr& failure);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  bool outcome();

  const std::shared_ptr<ShmRing> ring_;
  const Verb verb_;
  const uint64_t last_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> ended_{false};
};

}  // namespace plumb

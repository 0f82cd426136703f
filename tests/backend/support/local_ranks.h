// All ranks of a local backend in one thread, and what waiting for their work ends with.
#pragma once
#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "backend/local.h"

namespace plumb::test {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Work = c10::intrusive_ptr<c10d::Work>;

struct Ranks {
  explicit Ranks(int size, std::chrono::milliseconds timeout = std::chrono::milliseconds(20'000))
      : hub(std::make_shared<LocalHub>(size, timeout)) {
    for (int r = 0; r < size; ++r) all.push_back(make_local_backend(hub, r));
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  // What waits for a rank that never came holds the hub, until that rank has left.
  ~Ranks() {
    for (int r = 0; r < hub->size(); ++r) hub->leave(r);
  }
  Work send(int rank, int to, int tag, const at::Tensor& message) const {
    std::vector<at::Tensor> one{message};
    return all[rank]->send(one, to, tag);
  }
  Work receive(int rank, int from, int tag, const at::Tensor& memory) const {
    std::vector<at::Tensor> one{memory};
    return all[rank]->recv(one, from, tag);
  }
  std::shared_ptr<LocalHub> hub;
  std::vector<Backend> all;
};

// What waiting for it ends with; empty when it ends well.
inline std::string outcome(const Work& work, std::chrono::milliseconds limit = std::chrono::milliseconds::zero()) {
  try {
    work->wait(limit);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace plumb::test

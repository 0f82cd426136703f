// Collectives with NCCL's semantics: each rank arrives in stream order, and finishes when all have arrived.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/machine.h"

namespace plumb::sim {

// Everybody's inputs, by rank.
using Contributions = std::vector<Tensors>;

// One rank's part in one collective.
struct Collective {
  std::string kind;       // "all_reduce"
  std::string agreement;  // what must be the same on every rank: "1024 float, sum"
  Tensors inputs;
  Tensors outputs;
  // Fills this rank's outputs (CPU tensors over them).
  std::function<void(const Contributions& contributions, const Tensors& outputs)> fill;
};

// Where the ranks meet for one collective.
struct Meeting {
  explicit Meeting(int size) : contributions(size) {}
  std::string description;
  int first_rank = -1;
  int enqueued = 0;  // ranks whose host has called
  int arrived = 0;   // ranks whose stream has come
  Contributions contributions;
  std::vector<std::function<void()>> fills;  // CPU tensors: run by the last to arrive
  std::shared_ptr<Promise> promise = std::make_shared<Promise>();
};

struct Communicator::Impl {
  Impl(int size, std::string name) : size(size), name(std::move(name)), next(size, 0), streams(size, {-1, 0}) {}

  // What a Work needs. `event` is the end on the communicator's stream; its stream is -1 for CPU tensors.
  struct Started {
    std::shared_ptr<Meeting> meeting;
    EventState event;
    int device = -1;
  };
  // The machine's lock is held.
  Started start(int rank, const Collective& collective);

  const int size;
  const std::string name;

 private:
  int stream_of(int rank, int device);
  std::shared_ptr<Meeting> meet(int rank, const Collective& collective, uint64_t& number);

  std::vector<uint64_t> next;                             // each rank's next collective
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;  // not yet called by all
  std::vector<std::pair<int64_t, uint64_t>> streams;      // each rank's stream index, and its session
};

}  // namespace plumb::sim

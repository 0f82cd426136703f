// The `tcp` backend: collectives of host memory between processes anywhere, over connections of our own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "backend/names.h"

namespace plumb {

// Listens at `address`; connects to whom it first talks to. `patience`: how long a wait keeps its core before it sleeps.
// `names`: of its ranks in errors.
c10::intrusive_ptr<c10d::Backend> make_tcp_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   const std::string& address, std::chrono::microseconds patience,
                                                   Names names = {});

// The tag of a message (Backend::send, recv) that is part of a gather has this bit: gathers have a lane of their own.
constexpr int kGatherTag = 1 << 29;

}  // namespace plumb

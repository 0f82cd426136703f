// What a collective does: one word for all backends of our own.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>

namespace plumb {

enum class Verb : uint32_t { barrier, broadcast, all_gather, reduce_scatter, all_reduce, all_to_all, scatter };

const char* name_of(Verb verb);
c10d::OpType type_of(Verb verb);

}  // namespace plumb

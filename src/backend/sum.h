// Sums over ranks in rank order, accumulated in f32 where the dtype is narrower: the same bits every time.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

namespace plumb {

enum class Reduction { sum, average, maximum, minimum };

// Every output becomes the reduction of all inputs, taken in order; all hold `numel` elements of `dtype` in CPU memory.
// An output may be one of the inputs. Throws on a dtype that has no such reduction.
void reduce_in_order(std::span<const void* const> inputs, std::span<void* const> outputs, int64_t numel,
                     at::ScalarType dtype, Reduction reduction);

}  // namespace plumb

// The global gradient norm, and clipping by it.
#pragma once

#include <deque>

#include "grad/bucket.h"

namespace plumb {

// How the norm is summed: as it comes fastest; the same bits whatever the buckets and shards, as long as those cut nowhere but
// between kAlignment neighbours; the same bits wherever they cut, which takes the host several times as long.
enum class NormOrder { any, exact, exact_anywhere };

// The 2-norm over all gradients of these buckets; a scalar on their device. `sharded`: they are parts, whose squares are
// summed over `shard`.
at::Tensor gradient_norm(const std::deque<Bucket>& buckets, bool sharded, Group& shard, NormOrder order,
                         const Where& where);

// The same between steps: of what .grad holds now, wherever the user put other values there.
at::Tensor shown_norm(std::deque<Bucket>& buckets, bool sharded, Group& shard, NormOrder order, const Where& where);
// A parameter whose .grad is nothing that a norm could count: with sharded gradients, a whole one that waits for its
// reduction. Null: there is none.
const Sink* first_unreduced(const std::deque<Bucket>& buckets, bool sharded);

// Scales all gradients so that a norm of `norm` becomes at most `limit`, as torch's clip_grad_norm_ does.
void clip_gradients(std::deque<Bucket>& buckets, const at::Tensor& norm, double limit);

// Whether every gradient of these buckets is finite, on every rank of `shard` where they are parts.
bool gradients_are_finite(const std::deque<Bucket>& buckets, bool sharded, Group& shard, const Where& where);

// By sink: whether its gradient is finite, as far as this rank holds it.
std::vector<int64_t> finite_sinks(const std::deque<Bucket>& buckets, size_t sinks);

// Scales all gradients.
void scale_gradients(std::deque<Bucket>& buckets, const at::Tensor& factor);

}  // namespace plumb

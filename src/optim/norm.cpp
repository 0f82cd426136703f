#include "optim/norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

#include "optim/exact.h"
#include "optim/runs.h"

namespace plumb {
namespace {

bool any_two(const Sink&, const Sink&) { return true; }

// The kept part of a bucket, with what the user put into .grad instead.
at::Tensor shown(const Bucket& bucket, bool sharded) {
  const auto aside = [](const Sink* sink) { return sink->grad().defined() && !sink->grad_in_bucket(); };
  if (std::ranges::none_of(bucket.sinks, aside)) return bucket.gradient;
  const auto options = at::TensorOptions().dtype(bucket.dtype).device(bucket.device());
  const at::Tensor flat =
      bucket.gradient.defined() ? bucket.gradient.clone() : at::zeros({bucket.kept.size()}, options);
  for (const Sink* sink : bucket.sinks) {
    if (!aside(sink)) continue;
    const at::Tensor own = sink->grad().is_sparse() ? sink->grad().to_dense() : sink->grad().detach();
    if (sharded) {
      const Range mine = overlap(sink->slot, sink->parameter.numel(), bucket.kept);
      const int64_t begin = std::clamp<int64_t>(mine.begin - bucket.kept.begin, 0, bucket.kept.size());
      flat.narrow(0, begin, mine.size()).copy_(own.reshape(-1));
    } else {
      view_in(flat, sink->slot.offset, *sink).copy_(own);
    }
  }
  return flat;
}

// The squares of kAlignment neighbours are summed in their order, which no bucket and no shard breaks; those sums exactly.
void add_squares(const at::Tensor& gradient, ExactSum& sum) {
  constexpr int64_t chunk = kAlignment << 16;
  for (int64_t begin = 0; begin < gradient.numel(); begin += chunk) {
    const int64_t count = std::min(chunk, gradient.numel() - begin);
    const at::Tensor squares = gradient.narrow(0, begin, count).to(at::kDouble).square().view({-1, kAlignment});
    at::Tensor sums = squares.select(1, 0).clone();
    for (int64_t i = 1; i < kAlignment; ++i) sums.add_(squares.select(1, i));
    sums = sums.cpu();
    const double* values = sums.const_data_ptr<double>();
    for (int64_t i = 0; i < sums.numel(); ++i) sum.add(values[i]);
  }
}

// In rows: a sum of very many f32 squares loses digits on the CPU.
void add_norms(const at::Tensor& gradient, std::vector<at::Tensor>& norms) {
  constexpr int64_t row = 1 << 14;
  const auto wide = c10::promoteTypes(gradient.scalar_type(), at::kFloat);
  const int64_t rows = gradient.is_cpu() ? gradient.numel() / row : 0;
  if (rows > 1) {
    const at::Tensor each =
        at::linalg_vector_norm(gradient.narrow(0, 0, rows * row).view({rows, row}), 2, 1, false, wide);
    norms.push_back(at::linalg_vector_norm(each.to(at::kDouble)));
  }
  const int64_t rest = rows > 1 ? rows * row : 0;
  if (rest == gradient.numel()) return;
  const at::Tensor tail = gradient.narrow(0, rest, gradient.numel() - rest);
  norms.push_back(at::linalg_vector_norm(tail, 2, std::nullopt, false, wide).to(at::kDouble));
}

void add_each_square(const at::Tensor& gradient, ExactSum& sum) {
  constexpr int64_t chunk = 1 << 20;
  for (int64_t begin = 0; begin < gradient.numel(); begin += chunk) {
    const int64_t count = std::min(chunk, gradient.numel() - begin);
    const at::Tensor squares = gradient.narrow(0, begin, count).to(at::kDouble).square().cpu();
    const double* values = squares.const_data_ptr<double>();
    for (int64_t i = 0; i < count; ++i) sum.add(values[i]);
  }
}

using Values = std::function<at::Tensor(const Bucket&)>;

// Of the norm: as wide as the widest gradient, and f32 at least.
at::ScalarType dtype_of(const std::deque<Bucket>& buckets) {
  const bool wide = std::ranges::any_of(
      buckets, [](const Bucket& bucket) { return c10::toRealValueType(bucket.dtype) == at::kDouble; });
  return wide ? at::kDouble : at::kFloat;
}

at::Tensor exact_norm(const std::deque<Bucket>& buckets, const Values& values, bool sharded, Group& shard,
                      NormOrder order, const Where& where) {
  ExactSum sum;
  at::TensorOptions options = at::kFloat;
  for (const Bucket& bucket : buckets) {
    options = options.device(bucket.device());
    const at::Tensor gradient = values(bucket);
    for (const Run& run : runs_of(bucket, bucket.kept, any_two)) {
      const at::Tensor members = part(gradient, bucket.kept, run);
      order == NormOrder::exact ? add_squares(members, sum) : add_each_square(members, sum);
    }
  }
  sum.carry();
  if (sharded) {
    at::Tensor wire = at::empty({static_cast<int64_t>(sum.limbs.size())}, at::kLong);
    std::copy(sum.limbs.begin(), sum.limbs.end(), wire.data_ptr<int64_t>());
    wire = wire.to(options.device());
    shard.all_reduce(wire).wait(where);
    wire = wire.cpu();
    std::copy_n(wire.const_data_ptr<int64_t>(), sum.limbs.size(), sum.limbs.begin());
  }
  // Made as f64: what f32 cannot hold is infinite there, and no error.
  return at::full({}, std::sqrt(sum.value()), options.dtype(at::kDouble)).to(dtype_of(buckets));
}

at::Tensor norm_of(const std::deque<Bucket>& buckets, const Values& values, bool sharded, Group& shard, NormOrder order,
                   const Where& where) {
  at::NoGradGuard no_grad;
  if (order != NormOrder::any) return exact_norm(buckets, values, sharded, shard, order, where);
  std::vector<at::Tensor> norms;
  at::TensorOptions options = at::kFloat;
  for (const Bucket& bucket : buckets) {
    options = options.device(bucket.device());
    const at::Tensor gradient = values(bucket);
    for (const Run& run : runs_of(bucket, bucket.kept, any_two)) add_norms(part(gradient, bucket.kept, run), norms);
  }
  at::Tensor norm =
      norms.empty() ? at::zeros({}, options.dtype(at::kDouble)) : at::linalg_vector_norm(at::stack(norms));
  if (sharded) {
    norm = norm.square();
    shard.all_reduce(norm).wait(where);
    norm = norm.sqrt();
  }
  return norm.to(dtype_of(buckets));
}

}  // namespace

at::Tensor gradient_norm(const std::deque<Bucket>& buckets, bool sharded, Group& shard, NormOrder order,
                         const Where& where) {
  return norm_of(buckets, [](const Bucket& bucket) { return bucket.gradient; }, sharded, shard, order, where);
}

at::Tensor shown_norm(std::deque<Bucket>& buckets, bool sharded, Group& shard, NormOrder order, const Where& where) {
  std::deque<Alone> alone;
  for (Bucket& bucket : buckets) alone.emplace_back(bucket.lanes, bucket.device());
  return norm_of(buckets, [&](const Bucket& bucket) { return shown(bucket, sharded); }, sharded, shard, order, where);
}

const Sink* first_unreduced(const std::deque<Bucket>& buckets, bool sharded) {
  for (const Bucket& bucket : buckets) {
    for (const Sink* sink : bucket.sinks) {
      if (!sink->grad().defined() || sink->grad_in_bucket()) continue;
      const int64_t piece = overlap(sink->slot, sink->parameter.numel(), bucket.kept).size();
      const bool fits = sharded ? sink->grad_is_piece() && sink->grad().numel() == piece
                                : sink->grad().sizes() == sink->parameter.sizes();
      if (!fits) return sink;
    }
  }
  return nullptr;
}

void clip_gradients(std::deque<Bucket>& buckets, const at::Tensor& norm, double limit) {
  at::NoGradGuard no_grad;
  const at::Tensor coefficient = (limit / (norm + 1e-6)).clamp_max(1.0);
  // On the CPU the value is at hand, and most steps need no scaling.
  if (norm.is_cpu() && coefficient.item<double>() >= 1.0) return;
  scale_gradients(buckets, coefficient);
}

bool gradients_are_finite(const std::deque<Bucket>& buckets, bool sharded, Group& shard, const Where& where) {
  at::NoGradGuard no_grad;
  at::Tensor bad;
  for (const Bucket& bucket : buckets) {
    if (!bad.defined()) bad = at::zeros({}, at::device(bucket.sinks[0]->parameter.device()).dtype(at::kFloat));
    for (const Run& run : runs_of(bucket, bucket.kept, any_two)) {
      bad += at::isfinite(part(bucket.gradient, bucket.kept, run)).logical_not_().any().to(at::kFloat);
    }
  }
  if (sharded) shard.all_reduce(bad).wait(where);
  return bad.item<float>() == 0.0F;
}

std::vector<int64_t> finite_sinks(const std::deque<Bucket>& buckets, size_t sinks) {
  at::NoGradGuard no_grad;
  std::vector<int64_t> finite(sinks, 1);
  for (const Bucket& bucket : buckets) {
    for (const Sink* sink : bucket.sinks) {
      if (!sink->grad().defined() || !bucket.gradient.defined()) continue;
      const Range mine = overlap(sink->slot, sink->parameter.numel(), bucket.kept);
      if (mine.size() == 0) continue;
      const at::Tensor held = bucket.gradient.narrow(0, mine.begin - bucket.kept.begin, mine.size());
      finite[sink->index] = at::isfinite(held).all().item<bool>() ? 1 : 0;
    }
  }
  return finite;
}

void scale_gradients(std::deque<Bucket>& buckets, const at::Tensor& factor) {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets) {
    for (const Run& run : runs_of(bucket, bucket.kept, any_two)) part(bucket.gradient, bucket.kept, run).mul_(factor);
    for (Sink* sink : bucket.sinks) sink->adopt(false);
  }
}

}  // namespace plumb

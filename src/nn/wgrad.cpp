#include "nn/wgrad.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lane/lane.h"
#include "nn/grouped_wgrad.h"
#include "nn/product.h"
#include "plumb/error.h"

#ifdef PLUMB_CUDA_KERNELS
#include <ATen/cuda/CUDAContext.h>
#endif

namespace plumb::nn {
namespace {

// One target [groups, out, in] instead of one per group.
bool is_grouped(const std::vector<GradTarget>& targets) { return targets.size() == 1 && targets[0].buffer.dim() == 3; }

// target (+)= dyᵀ x
void write_one(const at::Tensor& buffer, bool accumulate, const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor out = buffer;
  if (dy.size(0) == 0) {
    if (!accumulate) out.zero_();
    return;
  }
  const at::Tensor dyt = dy.t();
  if (out.scalar_type() == dy.scalar_type()) {
    if (accumulate) {
      at::addmm_out(out, out, dyt, x);
    } else {
      at::mm_out(out, dyt, x);
    }
  } else if (out.is_cuda()) {
    if (accumulate) {
      at::addmm_out(out, out, dyt, x, out.scalar_type());
    } else {
      at::mm_out(out, dyt, x, out.scalar_type());
    }
  } else {
    // The CPU has no product of bf16 with sums in f32; casting a block of rows at a time keeps the copies small.
    constexpr int64_t block = 1024;
    for (int64_t row = 0; row < dy.size(0); row += block) {
      const int64_t rows = std::min(block, dy.size(0) - row);
      at::addmm_out(out, out, dy.narrow(0, row, rows).to(out.scalar_type()).t(),
                    x.narrow(0, row, rows).to(out.scalar_type()), accumulate || row > 0 ? 1 : 0);
    }
  }
}

// All groups by our own kernel, without waiting for the counts. False: it does not take this problem.
bool write_by_kernel([[maybe_unused]] const std::vector<GradTarget>& targets, [[maybe_unused]] const at::Tensor& dy,
                     [[maybe_unused]] const at::Tensor& x, [[maybe_unused]] const Groups& groups) {
#ifdef PLUMB_CUDA_KERNELS
  if (!dy.is_cuda() || dy.scalar_type() != at::kBFloat16 || dy.size(0) == 0) return false;
  const bool one = is_grouped(targets);
  std::vector<float*> sums;
  for (const GradTarget& target : targets) {
    if (!target.buffer.defined() || target.buffer.scalar_type() != at::kFloat) return false;
    for (int64_t e = 0; e < (one ? groups.experts() : 1); ++e) {
      sums.push_back(target.buffer.mutable_data_ptr<float>() + e * dy.size(1) * x.size(1));
    }
  }
  kernel::GroupedWgrad problem;
  problem.dy = dy.const_data_ptr();
  problem.x = x.const_data_ptr();
  problem.ends = groups.ends().const_data_ptr<int32_t>();
  problem.sums = sums.data();
  problem.groups = static_cast<int>(sums.size());
  problem.rows = dy.size(0);
  problem.out = dy.size(1);
  problem.in = x.size(1);
  const bool some = std::ranges::any_of(targets, &GradTarget::accumulate);
  problem.accumulate = some;
  if (!kernel::grouped_wgrad_fits(problem)) return false;
  if (some) {
    for (const GradTarget& target : targets) {
      if (!target.accumulate) target.buffer.zero_();
    }
  }
  if (const char* wrong = kernel::grouped_wgrad(problem, at::cuda::getCurrentCUDAStream())) {
    throw Error(c10::str("the kernel of the grouped weight gradient did not start: ", wrong));
  }
  return true;
#else
  return false;
#endif
}

// Whether libtorch's grouped product computes this without waiting for the counts.
bool grouped_mm_takes(const at::Tensor& dy, const at::Tensor& x) {
  return dy.is_cuda() && dy.scalar_type() == at::kBFloat16 && dy.size(0) > 0 && dy.size(1) % 8 == 0 &&
         x.size(1) % 8 == 0;
}

at::Tensor by_grouped_mm(const at::Tensor& dy, const at::Tensor& x, const Groups& groups) {
  return at::_grouped_mm(at_16_bytes(dy).t(), at_16_bytes(x), groups.ends());
}

// All groups into buffers of the inputs' own dtype: libtorch's grouped product, and one more pass over memory. False: not
// such a problem.
bool write_by_grouped_mm(const std::vector<GradTarget>& targets, const at::Tensor& dy, const at::Tensor& x,
                         const Groups& groups) {
  if (!grouped_mm_takes(dy, x)) return false;
  for (const GradTarget& target : targets) {
    if (target.buffer.defined() && target.buffer.scalar_type() != dy.scalar_type()) return false;
  }
  const at::Tensor made = by_grouped_mm(dy, x, groups);
  const bool one = is_grouped(targets);
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i].buffer.defined()) continue;
    const at::Tensor part = one ? made : made.select(0, static_cast<int64_t>(i));
    targets[i].accumulate ? targets[i].buffer.add_(part) : targets[i].buffer.copy_(part);
  }
  return true;
}

}  // namespace

void write_wgrad(const std::vector<GradTarget>& targets, const at::Tensor& dy, const at::Tensor& x,
                 const Groups* groups) {
  at::NoGradGuard no_grad;
  if (groups == nullptr) {
    if (targets[0].buffer.defined()) write_one(targets[0].buffer, targets[0].accumulate, dy, x);
    return;
  }
  if (write_by_kernel(targets, dy, x, *groups) || write_by_grouped_mm(targets, dy, x, *groups)) return;
  const bool one = is_grouped(targets);
  int64_t begin = 0;
  for (int64_t e = 0; e < groups->experts(); ++e) {
    const int64_t rows = groups->sizes()[e];
    const GradTarget& target = targets[one ? 0 : e];
    if (target.buffer.defined()) {
      write_one(one ? target.buffer.select(0, e) : target.buffer, target.accumulate, dy.narrow(0, begin, rows),
                x.narrow(0, begin, rows));
    }
    begin += rows;
  }
}

void WgradJob::put_off() {
  made_on_.add(dy_.device());
  for (Slot& slot : slots_) slot.weight.accumulator = nullptr;  // the graph's
}

std::vector<at::Tensor> WgradJob::run(When when) {
  at::NoGradGuard no_grad;
  if (groups_) raise_complaint();
  if (when == When::delayed) {
    made_on_.join(dy_.device());
    // Perhaps under another stream than the backward's, and then they are let go: all that any path below reads.
    keep_for_current(dy_);
    keep_for_current(x_);
    if (groups_) keep_for_current(groups_->ends());
  }
  std::vector<GradTarget> targets(slots_.size());
  std::vector<at::Tensor> made(slots_.size());
  bool any = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.weight.wanted || slot.delivery.when != when) continue;
    any = true;
    if (slot.delivery.into_buffer) {
      targets[i] = open_checked(*slot.weight.sink, slot.like);
    } else if (groups_ && slots_.size() == 1 && grouped_mm_takes(dy_, x_)) {
      made[i] = by_grouped_mm(dy_, x_, *groups_);
      any = false;
    } else {
      made[i] = at::empty(slot.like.sizes, slot.like.options);
      targets[i] = {made[i], false};
    }
  }
  if (!any) return made;
  write_wgrad(targets, dy_, x_, groups_.get());
  for (const Slot& slot : slots_) {
    if (slot.weight.wanted && slot.delivery.when == when && slot.delivery.into_buffer) slot.weight.sink->wrote();
  }
  return made;
}

void WgradStore::put(WgradJob job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
}

void WgradStore::flush() {
  const std::lock_guard lock(mutex_);
  size_t done = 0;
  try {
    for (; done < jobs_.size(); ++done) {
      const std::vector<at::Tensor> made = jobs_[done].run(When::delayed);
      for (size_t i = 0; i < made.size(); ++i) {
        const WgradJob::Slot& slot = jobs_[done].slots()[i];
        if (slot.weight.wanted && slot.delivery.into_buffer && slot.delivery.when == When::delayed) {
          slot.weight.sink->made_up();
        }
        if (!made[i].defined()) continue;
        at::NoGradGuard no_grad;
        at::Tensor& grad = slot.weight.leaf.mutable_grad();
        const at::Tensor ruled = made[i].to(slot.weight.leaf.grad_dtype().value_or(made[i].scalar_type()));
        if (grad.defined()) {
          grad.add_(ruled);
        } else {
          grad = ruled;
        }
      }
    }
  } catch (...) {
    jobs_.erase(jobs_.begin(), jobs_.begin() + static_cast<std::ptrdiff_t>(done));
    throw;
  }
  jobs_.clear();
}

std::vector<at::Tensor> deliver(at::Tensor dy, at::Tensor x, std::shared_ptr<const Groups> groups,
                                const std::vector<Weight>& weights, const std::vector<Like>& likes,
                                const std::shared_ptr<WgradStore>& store) {
  std::vector<WgradJob::Slot> slots;
  bool delayed = false;
  for (size_t i = 0; i < weights.size(); ++i) {
    slots.push_back({weights[i], likes[i], decide(weights[i], store ? When::delayed : When::now)});
    if (!weights[i].wanted || slots[i].delivery.when == When::now) continue;
    delayed = true;
    if (!weights[i].leaf.defined()) {
      throw Error(
          "a delayed weight gradient has nowhere to go: the weight is computed from other tensors; "
          "delay_wgrad_compute needs weights that are parameters");
    }
  }
  WgradJob job(std::move(dy), std::move(x), std::move(groups), std::move(slots));
  std::vector<at::Tensor> returned = job.run(When::now);
  for (size_t i = 0; i < weights.size(); ++i) {
    const WgradJob::Slot& slot = job.slots()[i];
    if (!slot.weight.wanted) continue;
    if (slot.delivery.when == When::delayed && slot.weight.sink) slot.weight.sink->put_off();
    if (slot.delivery.returned == Returned::stand_in) {
      returned[i] = stand_in(slot.weight, slot.like);
      slot.weight.sink->stood_in();
    }
    // What autograd is handed orders it; a second contribution comes without a stand-in of its own.
    if (!returned[i].defined()) order_accumulator(slot.weight);
  }
  if (delayed) {
    job.put_off();
    store->put(std::move(job));
  }
  return returned;
}

}  // namespace plumb::nn

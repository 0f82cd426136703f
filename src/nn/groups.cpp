#include "nn/groups.h"

#include <ATen/ATen.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <string>

#include "nn/token_ends.h"
#include "plumb/error.h"
#include "plumb/nn.h"

#ifdef PLUMB_CUDA_KERNELS
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace plumb::nn {
namespace {

std::string wrong_count(int64_t expert, int64_t count, int64_t rows) {
  return c10::str("expert ", expert, " is given ", count, " tokens; expected 0 to ", rows, ", the rows of the input");
}

std::string wrong_sum(int64_t sum, int64_t rows) {
  return c10::str("the experts' tokens add up to ", sum, "; expected ", rows, ", the rows of the input");
}

#ifdef PLUMB_CUDA_KERNELS
// One for the process: whichever kernel complains, whoever looks next throws.
kernel::Complaint* complaint() {
  static kernel::Complaint* const box = kernel::new_complaint();
  return box;
}
std::atomic<bool> may_complain = false;
#endif

}  // namespace

void raise_complaint([[maybe_unused]] std::optional<int> rank) {
#ifdef PLUMB_CUDA_KERNELS
  if (!may_complain) return;
  kernel::Complaint& box = *complaint();
  std::atomic_ref<int32_t> made(box.made);
  if (made.load(std::memory_order_acquire) == 0) return;
  const kernel::Complaint found = box;
  if (made.exchange(0) == 0) return;  // another thread throws it
  const std::string message =
      (found.expert >= 0 ? wrong_count(found.expert, found.found, found.rows) : wrong_sum(found.found, found.rows)) +
      ". These counts were on a device, and nobody waited for them: an earlier grouped operation took all rows for the "
      "last expert's. What it gave, and gradients since, are wrong: drop them (zero_grad()), and go back to earlier "
      "parameters if a step was made";
  throw rank ? Error(*rank, message) : Error(message);
#endif
}

bool Groups::ends_by_kernel([[maybe_unused]] const at::Tensor& counts, [[maybe_unused]] bool are_ends,
                            [[maybe_unused]] c10::Device device) {
#ifdef PLUMB_CUDA_KERNELS
  const c10::cuda::CUDAGuard guard(device);
  if (!kernel::runs_here() || complaint() == nullptr) return false;
  may_complain = true;
  const at::Tensor whole = counts.to(at::kLong).contiguous();
  ends_ = at::empty({experts_}, whole.options().dtype(at::kInt));
  kernel::TokenEnds problem;
  problem.counts = whole.const_data_ptr();
  problem.are_ends = are_ends;
  problem.experts = experts_;
  problem.rows = rows_;
  problem.ends = ends_.mutable_data_ptr<int32_t>();
  problem.complaint = complaint();
  if (const char* wrong = kernel::token_ends(problem, at::cuda::getCurrentCUDAStream())) {
    throw Error(c10::str("the kernel that checks token counts did not start: ", wrong));
  }
  return true;
#else
  return false;
#endif
}

Groups::Groups(const Tokens& tokens, int64_t experts, int64_t rows, c10::Device device)
    : experts_(experts), rows_(rows) {
  const at::Tensor& counts = tokens.counts;
  if (!counts.defined() || counts.dim() != 1 || counts.size(0) != experts) {
    throw Error(c10::str("token counts of shape ", counts.defined() ? counts.sizes() : at::IntArrayRef(),
                         "; expected [", experts, "], one per expert"));
  }
  if (!at::isIntegralType(counts.scalar_type(), /*includeBool=*/false)) {
    throw Error(c10::str("token counts are ", counts.scalar_type(), "; expected integers"));
  }
  if (!counts.is_cpu() && counts.device() != device) {
    throw Error(
        c10::str("token counts are on ", counts.device(), "; expected the host or ", device, ", the input's device"));
  }
  if (rows > INT32_MAX) throw Error(c10::str(rows, " rows; at most ", INT32_MAX, " are supported"));
  at::NoGradGuard no_grad;
  raise_complaint();
  if (counts.is_cuda() && ends_by_kernel(counts, tokens.are_ends, device)) return;
  // Of our own: the caller may refill his, also in pinned memory that a device has not read yet.
  const at::Tensor ends = tokens.are_ends ? counts.to(at::kLong, /*non_blocking=*/false, /*copy=*/true).contiguous()
                                          : counts.cumsum(0, at::kLong);
  if (counts.is_cpu()) {
    const auto* data = ends.const_data_ptr<int64_t>();
    for (int64_t e = 0; e < experts; ++e) sizes_.push_back(data[e] - (e == 0 ? 0 : data[e - 1]));
    check_sizes();
  }
  ends_ = ends.to(device, at::kInt, /*non_blocking=*/true);
  if (!counts.is_cpu()) sizes();  // no kernel looks at them: better to wait than to read other rows
}

const std::vector<int64_t>& Groups::sizes() const {
  const std::lock_guard lock(mutex_);
  if (sizes_.empty() && experts_ > 0) {
    const at::Tensor ends = ends_.cpu();
    raise_complaint();
    const auto* data = ends.const_data_ptr<int32_t>();
    for (int64_t e = 0; e < experts_; ++e) sizes_.push_back(data[e] - (e == 0 ? 0 : data[e - 1]));
    check_sizes();
  }
  return sizes_;
}

void Groups::check_sizes() const {
  for (size_t e = 0; e < sizes_.size(); ++e) {
    if (sizes_[e] < 0) throw Error(wrong_count(static_cast<int64_t>(e), sizes_[e], rows_));
  }
  const int64_t sum = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
  if (sum != rows_) throw Error(wrong_sum(sum, rows_));
}

}  // namespace plumb::nn

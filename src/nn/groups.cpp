#include "nn/groups.h"

#include <ATen/ATen.h>

#include <numeric>

#include "plumb/error.h"
#include "plumb/nn.h"

namespace plumb::nn {

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
  const at::Tensor ends = tokens.are_ends ? counts : counts.cumsum(0, at::kLong);
  if (counts.is_cpu()) {
    const at::Tensor whole = ends.to(at::kLong).contiguous();
    const auto* data = whole.const_data_ptr<int64_t>();
    for (int64_t e = 0; e < experts; ++e) sizes_.push_back(data[e] - (e == 0 ? 0 : data[e - 1]));
    check_sizes();
  }
  ends_ = ends.to(device, at::kInt, /*non_blocking=*/true).contiguous();
}

const std::vector<int64_t>& Groups::sizes() const {
  const std::lock_guard lock(mutex_);
  if (sizes_.empty() && experts_ > 0) {
    const at::Tensor ends = ends_.cpu();
    const auto* data = ends.const_data_ptr<int32_t>();
    for (int64_t e = 0; e < experts_; ++e) sizes_.push_back(data[e] - (e == 0 ? 0 : data[e - 1]));
    check_sizes();
  }
  return sizes_;
}

void Groups::check_sizes() const {
  for (size_t e = 0; e < sizes_.size(); ++e) {
    if (sizes_[e] < 0) {
      throw Error(c10::str("expert ", e, " is given ", sizes_[e], " tokens; expected none or more"));
    }
  }
  const int64_t sum = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
  if (sum != rows_) {
    throw Error(c10::str("the experts' tokens add up to ", sum, "; expected ", rows_, ", the rows of the input"));
  }
}

}  // namespace plumb::nn

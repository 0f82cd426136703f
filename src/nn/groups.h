// Which rows belong to which expert: checked where they can be seen, never waited for where they need not be.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace plumb::nn {

struct Tokens;

class Groups {
 public:
  // Throws for counts that are negative or do not add up to `rows`. Counts on a device with our kernels are not waited
  // for: a kernel checks them, gives all rows to the last expert if they are wrong, and raise_complaint() throws.
  Groups(const Tokens& tokens, int64_t experts, int64_t rows, c10::Device device);

  int64_t experts() const { return experts_; }
  // On the rows' device, int32: expert e has the rows [ends[e-1], ends[e]).
  const at::Tensor& ends() const { return ends_; }
  // On the host. The first call waits for a device that has them alone, and checks them then.
  const std::vector<int64_t>& sizes() const;

 private:
  void check_sizes() const;
  bool ends_by_kernel(const at::Tensor& counts, bool are_ends, c10::Device device);

  int64_t experts_, rows_;
  at::Tensor ends_;
  mutable std::mutex mutex_;
  mutable std::vector<int64_t> sizes_;
};

// Throws if a kernel has found wrong counts since the last call. Waits for nothing: so whatever can still do harm with
// them (another grouped operation, a weight gradient, a step) asks first.
void raise_complaint(std::optional<int> rank = {});

}  // namespace plumb::nn

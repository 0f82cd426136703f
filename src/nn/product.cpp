#include "nn/product.h"

#include <ATen/ATen.h>

#include <cstdint>

namespace plumb::nn {
namespace {

bool is_grouped(const std::vector<at::Tensor>& weights) { return weights.size() == 1 && weights[0].dim() == 3; }

at::Tensor of_expert(const std::vector<at::Tensor>& weights, int64_t e) {
  return is_grouped(weights) ? weights[0].select(0, e) : weights[e];
}

bool is_one(const std::vector<at::Tensor>& biases) { return biases.size() == 1 && biases[0].dim() == 2; }

at::Tensor bias_of(const std::vector<at::Tensor>& biases, int64_t e) {
  return is_one(biases) ? biases[0].select(0, e) : biases[e];
}

}  // namespace

at::Tensor one_over(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors[0];
  const int64_t spacing = tensors.size() > 1 ? tensors[1].storage_offset() - first.storage_offset() : first.numel();
  // The copy engine reads rows of 16 bytes.
  if (spacing < first.numel() || spacing * first.element_size() % 16 != 0) return {};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.is_alias_of(first) || tensor.sizes() != first.sizes() || !tensor.is_contiguous() ||
        tensor.scalar_type() != first.scalar_type() ||
        tensor.storage_offset() != first.storage_offset() + static_cast<int64_t>(i) * spacing) {
      return {};
    }
  }
  c10::DimVector sizes(first.sizes()), strides(first.strides());
  sizes.insert(sizes.begin(), static_cast<int64_t>(tensors.size()));
  strides.insert(strides.begin(), spacing);
  return first.as_strided(sizes, strides);
}

at::Tensor at_16_bytes(const at::Tensor& tensor) {
  bool fits = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0 &&
              (tensor.stride(-1) == 1 || tensor.stride(-2) == 1);
  for (const int64_t stride : tensor.strides()) {
    fits = fits && (stride == 1 || (stride > 0 && stride * tensor.element_size() % 16 == 0));
  }
  return fits ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

at::Tensor grouped_product(const at::Tensor& x, const std::vector<at::Tensor>& weights, const Groups& groups,
                           Side side) {
  const bool forward = side == Side::forward;
  const int64_t columns = weights[0].size(forward ? -2 : -1);
  // libtorch's grouped product reads the counts on the device; it wants bf16, and rows and columns of 16 bytes.
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.size(0) > 0 && x.size(1) % 8 == 0 && columns % 8 == 0) {
    at::Tensor all = is_grouped(weights) ? weights[0] : one_over(weights);
    if (!all.defined()) all = at::stack(weights);
    all = at_16_bytes(all);
    return at::_grouped_mm(at_16_bytes(x), forward ? all.transpose(-2, -1) : all, groups.ends());
  }
  at::Tensor y = at::empty({x.size(0), columns}, x.options());
  int64_t begin = 0;
  for (int64_t e = 0; e < groups.experts(); ++e) {
    const int64_t rows = groups.sizes()[e];
    if (rows > 0) {
      at::Tensor part = y.narrow(0, begin, rows);
      const at::Tensor weight = of_expert(weights, e);
      at::mm_out(part, x.narrow(0, begin, rows), forward ? weight.t() : weight);
    }
    begin += rows;
  }
  return y;
}

void add_bias(const at::Tensor& y, const std::vector<at::Tensor>& biases, const Groups& groups,
              const at::Tensor& factors) {
  if (biases.empty()) return;
  int64_t begin = 0;
  for (int64_t e = 0; e < groups.experts(); ++e) {
    const int64_t rows = groups.sizes()[e];
    at::Tensor bias = bias_of(biases, e);
    if (factors.defined()) bias = factors.narrow(0, begin, rows).unsqueeze(-1) * bias;
    y.narrow(0, begin, rows).add_(bias);
    begin += rows;
  }
}

std::vector<at::Tensor> bias_gradients(const at::Tensor& dy, const std::vector<at::Tensor>& biases,
                                       const std::vector<bool>& wanted, const Groups& groups) {
  std::vector<at::Tensor> gradients(biases.size());
  for (size_t i = 0; i < biases.size(); ++i) {
    if (wanted[i]) gradients[i] = at::empty(biases[i].sizes(), dy.options());
  }
  const bool one = is_one(biases);
  int64_t begin = 0;
  for (int64_t e = 0; e < groups.experts(); ++e) {
    const int64_t rows = groups.sizes()[e];
    if (wanted[one ? 0 : e]) {
      at::Tensor place = bias_of(gradients, e);
      at::sum_out(place, dy.narrow(0, begin, rows), 0);
    }
    begin += rows;
  }
  return gradients;
}

at::Tensor plain_grouped_product(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                 const std::vector<at::Tensor>& biases, const Groups& groups,
                                 const at::Tensor& factors) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (int64_t e = 0; e < groups.experts(); ++e) {
    const int64_t rows = groups.sizes()[e];
    at::Tensor part = x.narrow(0, begin, rows).mm(of_expert(weights, e).t());
    if (!biases.empty()) {
      at::Tensor bias = bias_of(biases, e);
      if (factors.defined()) bias = factors.narrow(0, begin, rows).unsqueeze(-1) * bias;
      part = (part + bias).to(part.scalar_type());
    }
    parts.push_back(part);
    begin += rows;
  }
  return at::cat(parts);
}

}  // namespace plumb::nn

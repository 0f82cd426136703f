// The GPT's forward pass and its initial values.
#include "model/gpt.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "plumb/checkpoint.h"
#include "plumb/error.h"

namespace plumb::model {

namespace nn = torch::nn;

BlockImpl::BlockImpl(const GptSize& size) : heads_(size.heads) {
  const int64_t width = size.width;
  attention_norm_ = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({width})));
  qkv_ = register_module("qkv", nn::Linear(width, 3 * width));
  out_ = register_module("out", nn::Linear(width, width));
  mlp_norm_ = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({width})));
  if (size.experts > 0) {
    moe_ =
        register_module("moe", plumb::nn::MoE(plumb::nn::MoEOptions{
                                   .width = width, .hidden = 2 * width, .experts = size.experts, .top_k = size.top_k}));
    return;
  }
  up_ = register_module("up", nn::Linear(width, 4 * width));
  down_ = register_module("down", nn::Linear(4 * width, width));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto qkv = qkv_(attention_norm_(x)).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const auto attended = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                         /*is_causal=*/true);
  const auto y = x + out_(attended.transpose(1, 2).reshape({batch, length, width}));
  const auto z = mlp_norm_(y);
  return y + (moe_ ? moe_(z) : down_(at::gelu(up_(z), "tanh")));
}

ModelShape shape_of(const GptSize& size) {
  const int64_t w = size.width;
  // Attention's two matrices and their biases, two norms; then two more matrices, or a router and its experts.
  const int64_t block = 4 * w * w + 8 * w + (size.experts > 0 ? size.experts * (w + 6 * w * w) : 8 * w * w + 5 * w);
  ModelShape shape;
  shape.units.assign(size.layers, block);
  shape.units.push_back(size.vocabulary * w);
  shape.units.push_back(size.vocabulary * w);
  shape.others = size.context * w + 2 * w;
  shape.largest = std::max({4 * w * w, size.experts * 4 * w * w, size.vocabulary * w, size.context * w});
  return shape;
}

GptImpl::GptImpl(const GptSize& size, uint64_t seed) : size_(size) {
  if (size.layers < 1 || size.heads < 1 || size.width < 1 || size.context < 1 || size.vocabulary < 1) {
    throw Error("a gpt needs at least 1 layer, head, width, context and vocabulary");
  }
  if (size.width % size.heads != 0) {
    throw Error("width " + std::to_string(size.width) + " is not divisible by " + std::to_string(size.heads) +
                " heads; choose a width that is");
  }
  tokens_ = register_module("tokens", nn::Embedding(size.vocabulary, size.width));
  positions_ = register_module("positions", nn::Embedding(size.context, size.width));
  const auto blocks = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < size.layers; ++i) {
    blocks_.emplace_back(size);
    blocks->push_back(blocks_.back().ptr());
  }
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({size.width})));
  head_ = register_module("head", nn::Linear(nn::LinearOptions(size.width, size.vocabulary).bias(false)));

  // Projections that end in the residual stream start smaller, so that its variance does not grow with depth.
  const double residual = 1.0 / std::sqrt(2.0 * static_cast<double>(size.layers));
  auto generator = at::detail::createCPUGenerator(seed);
  torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    const std::string& name = item.key();
    at::Tensor& p = item.value();
    const bool into_residual =
        name.ends_with(".out.weight") || name.ends_with(".down.weight") || name.ends_with(".experts.down");
    if (p.dim() > 1) {
      p.normal_(0.0, 0.02 * (into_residual ? residual : 1.0), generator);
    } else if (name.ends_with(".bias")) {
      p.zero_();
    }
  }
}

void GptImpl::sum_experts_in(at::ScalarType dtype) {
  for (auto& item : named_parameters()) {
    if (item.key().find(".experts.") != std::string::npos) item.value().set_grad_dtype(dtype);
  }
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  TORCH_CHECK(length <= size_.context, "plumb: a sequence of ", length, " tokens; the model's context is ",
              size_.context);
  at::Tensor x = tokens_(tokens) + positions_->weight.narrow(0, 0, length);
  for (auto& block : blocks_) {
    x = recomputes_ ? checkpoint([block](const at::Tensor& h) mutable { return block(h); }, x) : block(x);
  }
  return head_(norm_(x));
}

}  // namespace plumb::model

// A small GPT, for the program and the benchmarks: plain torch::nn modules, or with a mixture of experts in each block.
// Its blocks, token embedding and head are units: where a strategy shards parameters, each is whole only while it is
// used.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <vector>

#include "layout/estimate.h"
#include "plumb/nn.h"
#include "plumb/unit.h"

namespace plumb::model {

struct GptSize {
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t width = 128;   // divisible by heads
  int64_t context = 64;  // the longest sequence
  int64_t vocabulary = 256;
  int64_t experts = 0;  // of the mixture in each block; 0: one dense mlp
  int64_t top_k = 2;    // experts that a token goes to
};

// The sizes of its parameters and units, without making any.
ModelShape shape_of(const GptSize& size);

// Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptSize& size);
  at::Tensor forward(const at::Tensor& x);

 private:
  int64_t heads_;
  torch::nn::LayerNorm attention_norm_{nullptr}, mlp_norm_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr}, up_{nullptr}, down_{nullptr};
  plumb::nn::MoE moe_{nullptr};  // in the place of up and down
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  // The parameters are a function of `size` and `seed` alone: the same on every rank, whatever the world's size, and
  // whatever else draws from torch's generators.
  GptImpl(const GptSize& size, uint64_t seed);

  // tokens: int64 [batch, length], length at most `size.context`. Returns logits [batch, length, vocabulary].
  at::Tensor forward(const at::Tensor& tokens);

  // From now on blocks keep nothing for their backward but their inputs, and run again there.
  void recompute_blocks() { recomputes_ = true; }
  // The dtype that gradients of the experts' weights have: their kernels write it, unrounded.
  void sum_experts_in(at::ScalarType dtype);

  const GptSize& size() const { return size_; }

 private:
  GptSize size_;
  bool recomputes_ = false;
  Unit<torch::nn::Embedding> tokens_{nullptr};
  torch::nn::Embedding positions_{nullptr};  // whole on every rank, like the norm: not worth a message
  std::vector<Unit<Block>> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  Unit<torch::nn::Linear> head_{nullptr};
};
TORCH_MODULE(Gpt);

}  // namespace plumb::model

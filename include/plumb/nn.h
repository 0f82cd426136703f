// Modules that write their weight gradients themselves, into the buffer of whoever owns it (see plumb/fused.h).
//
// Without a sink they behave as plain modules do. With `delay_wgrad_compute`, a backward computes only the gradient of
// the input; backward_dw() computes the weight gradients later, in the order of the backwards.
#pragma once

#include <plumb/fused.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace plumb::nn {

class WgradStore;

// How many rows of the input each expert gets, rows of the first expert first: an integer tensor of one entry per
// expert, on the host or on the input's device, where nobody waits for it. Counts that cannot be are an error: at once on
// the host; on a Hopper device at the next grouped operation, weight gradient or step() after it has looked at them.
struct Tokens {
  static Tokens sizes(at::Tensor per_expert) { return {std::move(per_expert), false}; }
  static Tokens ends(at::Tensor running_sum) { return {std::move(running_sum), true}; }
  at::Tensor counts;
  bool are_ends = false;
};

struct LinearOptions {
  int64_t in = 0, out = 0;
  bool bias = true;
  bool delay_wgrad_compute = false;
};

// y = x Wᵀ + b. Weight [out, in].
class LinearImpl : public torch::nn::Module {
 public:
  explicit LinearImpl(const LinearOptions& options);
  at::Tensor forward(const at::Tensor& x);
  void backward_dw();

  at::Tensor weight, bias;

 private:
  std::shared_ptr<WgradStore> store_;  // null: weight gradients are not delayed
};
TORCH_MODULE(Linear);

enum class Experts {
  grouped,   // one parameter [experts, out, in]
  separate,  // one parameter [out, in] per expert, side by side in memory
};

// A module whose experts' parameters stay side by side in memory when it is moved or cast.
class ExpertsModule : public torch::nn::Module {
 public:
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  // One parameter for all experts, or one each, registered under `name`: weights, and biases beside them.
  std::vector<at::Tensor> register_experts(const std::string& name, Experts kind, int64_t experts, int64_t out,
                                           int64_t in);
  std::vector<at::Tensor> register_biases(const std::string& name, Experts kind, int64_t experts, int64_t out,
                                          int64_t in);

 private:
  void pack();

  std::vector<std::vector<at::Tensor>> separate_;
};

struct GroupedLinearOptions {
  int64_t experts = 0, in = 0, out = 0;
  Experts weights = Experts::grouped;
  bool bias = false;
  bool delay_wgrad_compute = false;
};

// Expert e's rows of x times its own weight, transposed, and its own bias. A bias makes the host wait for counts that only
// a device has; its gradient comes through autograd, and is never delayed.
class GroupedLinearImpl : public ExpertsModule {
 public:
  explicit GroupedLinearImpl(const GroupedLinearOptions& options);
  // x [rows, in], rows sorted by expert. Returns [rows, out].
  at::Tensor forward(const at::Tensor& x, const Tokens& tokens);
  void backward_dw();

  std::vector<at::Tensor> weights, biases;  // one, or one per expert; no biases: empty

 private:
  int64_t experts_;
  std::shared_ptr<WgradStore> store_;
};
TORCH_MODULE(GroupedLinear);

enum class Activation { swiglu, gelu };

struct GroupedMLPOptions {
  int64_t experts = 0, width = 0, hidden = 0;
  Activation activation = Activation::swiglu;
  Experts weights = Experts::grouped;
  bool bias = false;
  bool delay_wgrad_compute = false;
};

// down(activation(up(x))) per expert as one node: saves the input and what goes into the activation, and computes the
// activation again in the backward. With SwiGLU, `up` has 2 * hidden rows: gate first, then the values it gates.
class GroupedMLPImpl : public ExpertsModule {
 public:
  explicit GroupedMLPImpl(const GroupedMLPOptions& options);
  // `probabilities` [rows], differentiable: a factor of each row's result, applied to what leaves the activation (and to
  // the bias of `down`). The same in exact arithmetic, but no result has to be kept for the factor's gradient.
  at::Tensor forward(const at::Tensor& x, const Tokens& tokens, const at::Tensor& probabilities = {});
  void backward_dw();

  std::vector<at::Tensor> up, down;
  std::vector<at::Tensor> up_biases, down_biases;  // empty without

 private:
  int64_t experts_;
  Activation activation_;
  std::shared_ptr<WgradStore> store_;
};
TORCH_MODULE(GroupedMLP);

// What a router decided: each of T tokens goes to k experts.
struct Routing {
  at::Tensor weights;  // [T, k], sums to 1 per token; differentiable
  at::Tensor order;    // int64 [T k]: the (token, choice) pairs sorted by expert; pair i is token i / k
  at::Tensor sizes;    // int64 [experts], on the tokens' device
};

// The `top_k` experts of softmax(x Wᵀ), in f32, their weights scaled to sum to 1. x [T, width], weight [experts, width].
Routing route(const at::Tensor& x, const at::Tensor& weight, int64_t top_k);

class RouterImpl : public torch::nn::Module {
 public:
  RouterImpl(int64_t width, int64_t experts, int64_t top_k);
  Routing forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  int64_t top_k_;
};
TORCH_MODULE(Router);

// Where a router's weights are applied: to the experts' results, or to what leaves the activation, inside of them.
enum class Weigh { results, activations };

// Rows of x [T, width], once for each choice, sorted by expert: [T k, width]; and back, weighted unless the activations
// were: [T, width].
at::Tensor permute(const at::Tensor& x, const Routing& routing);
at::Tensor unpermute(const at::Tensor& y, const Routing& routing, Weigh weigh = Weigh::results);
// The weights, in the order of permute()'s rows: [T k].
at::Tensor permuted_weights(const Routing& routing);

struct MoEOptions {
  int64_t width = 0, hidden = 0, experts = 8, top_k = 2;
  Activation activation = Activation::swiglu;
  Experts weights = Experts::grouped;
  bool bias = false;
  Weigh weigh = Weigh::results;
  bool delay_wgrad_compute = false;
};

// Router, permute, GroupedMLP, unpermute. Every token is served: there is no capacity, so a token's result depends on
// that token alone.
class MoEImpl : public torch::nn::Module {
 public:
  explicit MoEImpl(const MoEOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [..., width]
  void backward_dw() { experts->backward_dw(); }

  Router router{nullptr};
  GroupedMLP experts{nullptr};

 private:
  Weigh weigh_;
};
TORCH_MODULE(MoE);

}  // namespace plumb::nn

// The small models the scenarios train.
#pragma once

#include "libtorch.h"

#include "plumb/unit.h"

namespace plumb::scenarios {

// Two hidden layers, two heads, and a part nobody uses unless asked.
struct Net : torch::nn::Module {
  Net() {
    body = register_module("body", torch::nn::Linear(6, 8));
    middle = register_module("middle", torch::nn::Linear(8, 8));
    left = register_module("left", torch::nn::Linear(8, 3));
    right = register_module("right", torch::nn::Linear(8, 2));
    spare = register_module("spare", torch::nn::Linear(8, 3));
  }
  at::Tensor trunk(const at::Tensor& x) { return torch::tanh(middle->forward(torch::tanh(body->forward(x)))); }
  at::Tensor loss_left(const at::Tensor& x) { return left->forward(trunk(x)).pow(2).mean(); }
  at::Tensor loss_right(const at::Tensor& x) { return right->forward(trunk(x)).pow(2).mean(); }
  at::Tensor loss_spare(const at::Tensor& x) { return spare->forward(trunk(x)).pow(2).mean(); }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor h = trunk(x);
    return left->forward(h).pow(2).mean() + right->forward(h).sin().mean();
  }
  Unit<torch::nn::Linear> body{nullptr}, middle{nullptr}, left{nullptr}, right{nullptr}, spare{nullptr};
};

// Gradients that the user keeps.
struct Keeper : Net {
  std::vector<at::Tensor> kept;
};

// Layers of one size, each a unit: whatever is mixed up fits.
struct Alike : torch::nn::Module {
  explicit Alike(int length) {
    for (int i = 0; i < length; ++i) {
      layers.emplace_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
  }
  std::vector<Unit<torch::nn::Linear>> layers;
};

// Parameters of many sizes: scalar, empty, tiny, prime, large; one weighs each.
struct Bag : torch::nn::Module {
  explicit Bag(const std::vector<std::vector<int64_t>>& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::randn(shapes[i])));
    }
  }
  // A loss whose gradient differs in every element.
  at::Tensor loss(const at::Tensor& x) {
    at::Tensor total = torch::zeros({});
    const at::Tensor factor = x.sum();
    for (auto& weight : weights) {
      if (weight.numel() > 0)
        total = total + (weight.to(at::kFloat) * factor).sin().sum() + weight.to(at::kFloat).pow(2).sum() * 0.1;
    }
    return total;
  }
  std::vector<at::Tensor> weights;
};

struct Sizes : torch::nn::Module {
  explicit Sizes(const std::vector<std::vector<int64_t>>& shapes) {
    bag = register_module("bag", std::make_shared<Bag>(shapes));
  }
  at::Tensor loss(const at::Tensor& x) { return bag->loss(x); }
  Unit<Bag> bag{nullptr};
};

// Batch normalisation: buffers that differ over the ranks.
struct Normed : torch::nn::Module {
  Normed() {
    linear = register_module("linear", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    head = register_module("head", torch::nn::Linear(8, 2));
  }
  at::Tensor loss(const at::Tensor& x) { return head->forward(norm->forward(linear->forward(x))).pow(2).mean(); }
  Unit<torch::nn::Linear> linear{nullptr}, head{nullptr};
  Unit<torch::nn::BatchNorm1d> norm{nullptr};
};

// One weight in two modules, and an embedding tied to the output.
struct Tied : torch::nn::Module {
  Tied() {
    embedding = register_module("embedding", torch::nn::Embedding(7, 5));
    hidden = register_module("hidden", torch::nn::Linear(5, 5));
    again = register_module("again", torch::nn::Linear(5, 5));
    again->weight = again->register_parameter("tied", hidden->weight);
  }
  at::Tensor loss(const at::Tensor& tokens) {
    at::Tensor h = torch::tanh(hidden->forward(embedding->forward(tokens)));
    h = torch::tanh(torch::linear(h, hidden->weight, again->bias));
    return torch::log_softmax(torch::matmul(h, embedding->weight.t()), -1).pow(2).mean();
  }
  Unit<torch::nn::Embedding> embedding{nullptr};
  Unit<torch::nn::Linear> hidden{nullptr}, again{nullptr};
};

// Re-entrant checkpointing, as libtorch users write it: the forward runs without a graph, the backward runs it again.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, int64_t body, const at::Tensor& x) {
    context->save_for_backward({x});
    context->saved_data["body"] = body;
    at::NoGradGuard no_grad;
    return (*reinterpret_cast<const Body*>(body))(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    at::Tensor y;
    {
      at::AutoGradMode on(true);
      y = (*reinterpret_cast<const Body*>(context->saved_data["body"].toInt()))(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {at::Tensor(), x.grad()};
  }
};

// `body` must outlive the backward.
inline at::Tensor checkpoint(const Checkpoint::Body& body, const at::Tensor& x) {
  return Checkpoint::apply(reinterpret_cast<int64_t>(&body), x);
}

}  // namespace plumb::scenarios

// The engine's arithmetic once more, plainly: one process, f64, one element after the other.
#pragma once

#include "libtorch.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "errors.h"
#include "plumb/plumb.h"

namespace plumb::test {

// Every optimizer's formula as its paper has it, for one parameter.
class Plain {
 public:
  explicit Plain(Optimizer optimizer) : optimizer_(optimizer) {}

  // `weight` and `gradient`: contiguous, f64.
  void update(const at::Tensor& weight, const at::Tensor& gradient, double lr, double decay) {
    const auto size = static_cast<size_t>(weight.numel());
    momentum_.resize(size);
    mean_.resize(size);
    square_.resize(size);
    ++count_;
    auto* w = weight.data_ptr<double>();
    const auto* g = gradient.const_data_ptr<double>();
    for (size_t i = 0; i < size; ++i) {
      std::visit([&](const auto& one) { w[i] = updated(one, w[i], g[i], i, lr, decay); }, optimizer_);
    }
  }

 private:
  template <class Adams>
  double direction(const Adams& adam, double g, size_t i) {
    mean_[i] = adam.beta1 * mean_[i] + (1 - adam.beta1) * g;
    square_[i] = adam.beta2 * square_[i] + (1 - adam.beta2) * g * g;
    const auto t = static_cast<double>(count_);
    const double mean = mean_[i] / (1 - std::pow(adam.beta1, t));
    const double square = square_[i] / (1 - std::pow(adam.beta2, t));
    return mean / (std::sqrt(square) + adam.eps);
  }
  double updated(const AdamW& adam, double w, double g, size_t i, double lr, double decay) {
    return w - lr * decay * w - lr * direction(adam, g, i);
  }
  double updated(const Adam& adam, double w, double g, size_t i, double lr, double decay) {
    return w - lr * direction(adam, g + decay * w, i);
  }
  double updated(const SGD& sgd, double w, double g, size_t i, double lr, double decay) {
    g += decay * w;
    if (sgd.momentum == 0) return w - lr * g;
    momentum_[i] = count_ == 1 ? g : sgd.momentum * momentum_[i] + (1 - sgd.dampening) * g;
    return w - lr * (sgd.nesterov ? g + sgd.momentum * momentum_[i] : momentum_[i]);
  }
  double updated(const RMSprop& rms, double w, double g, size_t i, double lr, double decay) {
    g += decay * w;
    square_[i] = rms.alpha * square_[i] + (1 - rms.alpha) * g * g;
    mean_[i] = rms.alpha * mean_[i] + (1 - rms.alpha) * g;
    const double spread = rms.centered ? square_[i] - mean_[i] * mean_[i] : square_[i];
    const double step = g / (std::sqrt(spread) + rms.eps);
    momentum_[i] = rms.momentum * momentum_[i] + step;
    return w - lr * momentum_[i];
  }
  double updated(const NoOptimizer&, double w, double, size_t, double, double) { return w; }
  double updated(const UserOptimizer&, double w, double, size_t, double, double) { return w; }

  Optimizer optimizer_;
  std::vector<double> momentum_, mean_, square_;
  int64_t count_ = 0;
};

// Draws of one seed; the same on every rank.
class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}
  int64_t whole(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(engine_); }
  double real(double least, double most) { return std::uniform_real_distribution<double>(least, most)(engine_); }
  bool one_in(int64_t n) { return whole(1, n) == 1; }
  template <class T>
  T of(std::vector<T> choices) {
    return choices[whole(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

inline at::Tensor noise(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::kDouble);
}

// Every optimizer, with values that all matter.
inline Optimizer any_optimizer(Draw& draw) {
  const double lr = draw.real(0.001, 0.1), decay = draw.one_in(3) ? 0.0 : draw.real(0.01, 0.3);
  const double momentum = draw.one_in(3) ? 0.0 : draw.real(0.3, 0.95);
  switch (draw.whole(0, 3)) {
    case 0:
      return AdamW{lr, draw.real(0.5, 0.95), draw.real(0.8, 0.999), draw.real(1e-8, 1e-2), decay};
    case 1:
      return Adam{lr, draw.real(0.5, 0.95), draw.real(0.8, 0.999), draw.real(1e-8, 1e-2), decay};
    case 2: {
      const bool nesterov = momentum > 0 && draw.one_in(2);
      return SGD{lr, momentum, nesterov ? 0.0 : draw.of<double>({0.0, 0.4}), decay, nesterov};
    }
    default:
      return RMSprop{lr, draw.real(0.5, 0.99), draw.real(1e-3, 1e-1), momentum, decay, draw.one_in(2)};
  }
}

// Parameters whose gradients are whatever a test wants: of odd sizes, a scalar, an empty one; some in a unit.
struct Bag : torch::nn::Module {
  Bag(const std::vector<std::vector<int64_t>>& shapes, uint64_t seed, at::ScalarType dtype) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), noise(shapes[i], seed + i).to(dtype)));
    }
  }
  // Its gradient is `gradients`, for the defined ones; undefined if there are none.
  at::Tensor forward(const std::vector<at::Tensor>& gradients) {
    at::Tensor loss;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const at::Tensor part = (weights[i].to(at::kDouble) * gradients[i]).sum();
      loss = loss.defined() ? loss + part : part;
    }
    return loss;
  }
  std::vector<at::Tensor> weights;
};

struct Parts : torch::nn::Module {
  explicit Parts(uint64_t seed, at::ScalarType dtype = at::kDouble) {
    inside = register_module("inside", std::make_shared<Bag>(kInside, seed, dtype));
    outside = register_module("outside", std::make_shared<Bag>(kOutside, seed + 100, dtype));
  }
  // By parameter, in the order of parameters(). Undefined if there is nothing.
  at::Tensor loss(const std::vector<at::Tensor>& gradients) {
    const auto cut = gradients.begin() + static_cast<int64_t>(kInside.size());
    const at::Tensor one = inside->forward({gradients.begin(), cut}), other = outside->forward({cut, gradients.end()});
    return one.defined() && other.defined() ? one + other : one.defined() ? one : other;
  }
  inline static const std::vector<std::vector<int64_t>> kInside = {{7, 5}, {3}, {1}, {2, 3, 4}},
                                                        kOutside = {{37}, {}, {0}, {4, 4}, {5, 1}};
  static constexpr size_t kCount = 9;
  Unit<Bag> inside{nullptr};
  std::shared_ptr<Bag> outside;
};

// Gradients for all of Parts, of this value.
inline std::vector<at::Tensor> ones(double value) {
  std::vector<at::Tensor> all;
  for (const auto* shapes : {&Parts::kInside, &Parts::kOutside}) {
    for (const auto& shape : *shapes) all.push_back(at::full(shape, value, at::kDouble));
  }
  return all;
}

// The largest difference, relative to the largest value.
inline double distance(const at::Tensor& found, const at::Tensor& expected) {
  if (expected.numel() == 0) return 0;
  const at::Tensor wide = expected.to(at::kDouble);
  return ((found.to(at::kDouble) - wide).abs().max() / (wide.abs().max() + 1e-9)).item<double>();
}

}  // namespace plumb::test

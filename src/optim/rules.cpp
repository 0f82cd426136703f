#include "optim/rules.h"

#include <ATen/ATen.h>

#include "plumb/error.h"

namespace plumb {
namespace {

// ---- one overload per optimizer

Moments moments(const AdamW&) { return {.mean = true, .square = true}; }
Moments moments(const Adam&) { return {.mean = true, .square = true}; }
Moments moments(const SGD& sgd) { return {.momentum = sgd.momentum != 0}; }
Moments moments(const RMSprop& rms) { return {.momentum = rms.momentum != 0, .mean = rms.centered, .square = true}; }
Moments moments(const NoOptimizer&) { return {}; }
Moments moments(const UserOptimizer&) { return {}; }

void apply(const AdamW& adam, const Operands& run) {
  at::_fused_adamw_({run.weight}, {run.gradient}, {run.mean}, {run.square}, {}, {run.count}, run.lr, adam.beta1,
                    adam.beta2, run.weight_decay, adam.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void apply(const Adam& adam, const Operands& run) {
  at::_fused_adam_({run.weight}, {run.gradient}, {run.mean}, {run.square}, {}, {run.count}, run.lr, adam.beta1,
                   adam.beta2, run.weight_decay, adam.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void apply(const SGD& sgd, const Operands& run) {
  std::vector<at::Tensor> momentum;
  if (run.momentum.defined()) momentum.push_back(run.momentum);
  at::_fused_sgd_({run.weight}, {run.gradient}, momentum, run.weight_decay, sgd.momentum, run.lr, sgd.dampening,
                  sgd.nesterov, /*maximize=*/false, /*is_first_step=*/run.first);
}

// libtorch has no fused kernel of this one; the order of operations is torch::optim::RMSprop's.
void apply(const RMSprop& rms, const Operands& run) {
  const at::Tensor gradient =
      run.weight_decay != 0 ? at::add(run.gradient, run.weight, run.weight_decay) : run.gradient;
  run.square.mul_(rms.alpha).addcmul_(gradient, gradient, 1 - rms.alpha);
  at::Tensor size;
  if (rms.centered) {
    run.mean.mul_(rms.alpha).add_(gradient, 1 - rms.alpha);
    size = run.square.addcmul(run.mean, run.mean, -1).sqrt_().add_(rms.eps);
  } else {
    size = run.square.sqrt().add_(rms.eps);
  }
  if (run.momentum.defined()) {
    run.momentum.mul_(rms.momentum).addcdiv_(gradient, size);
    run.weight.add_(run.momentum, -run.lr);
  } else {
    run.weight.addcdiv_(gradient, size, -run.lr);
  }
}

void apply(const NoOptimizer&, const Operands&) {}
void apply(const UserOptimizer&, const Operands&) {}

void check(int rank, bool good, const std::string& what) {
  if (!good) throw Error(rank, what);
}

void not_negative(int rank, const char* optimizer, const char* name, double value) {
  check(rank, value >= 0, c10::str(optimizer, "'s ", name, " is ", value, "; it must not be negative"));
}

template <class Adams>
void check_adam(int rank, const char* name, const Adams& adam) {
  check(rank, adam.beta1 >= 0 && adam.beta1 < 1 && adam.beta2 >= 0 && adam.beta2 < 1,
        c10::str(name, "'s betas are ", adam.beta1, " and ", adam.beta2, "; each must be in [0, 1)"));
  not_negative(rank, name, "eps", adam.eps);
}

void check_own(int rank, const AdamW& adam) { check_adam(rank, "AdamW", adam); }
void check_own(int rank, const Adam& adam) { check_adam(rank, "Adam", adam); }
void check_own(int rank, const SGD& sgd) {
  not_negative(rank, "SGD", "momentum", sgd.momentum);
  check(rank, !sgd.nesterov || (sgd.momentum > 0 && sgd.dampening == 0),
        "SGD with nesterov needs a momentum and no dampening");
}
void check_own(int rank, const RMSprop& rms) {
  check(rank, rms.alpha >= 0 && rms.alpha <= 1, c10::str("RMSprop's alpha is ", rms.alpha, "; it must be in [0, 1]"));
  not_negative(rank, "RMSprop", "eps", rms.eps);
  not_negative(rank, "RMSprop", "momentum", rms.momentum);
}
void check_own(int, const NoOptimizer&) {}
void check_own(int, const UserOptimizer&) {}

}  // namespace

Moments moments_of(const Optimizer& optimizer) {
  return std::visit([](const auto& one) { return moments(one); }, optimizer);
}

bool counts_updates(const Optimizer& optimizer) {
  return std::holds_alternative<AdamW>(optimizer) || std::holds_alternative<Adam>(optimizer);
}

void update(const Optimizer& optimizer, const Operands& run) {
  std::visit([&](const auto& one) { apply(one, run); }, optimizer);
}

void check_values(int rank, const Optimizer& optimizer) {
  check(rank, lr_of(optimizer) >= 0.0,
        c10::str("the learning rate is ", lr_of(optimizer), "; it must not be negative"));
  check(rank, weight_decay_of(optimizer) >= 0.0,
        c10::str("the weight decay is ", weight_decay_of(optimizer), "; it must not be negative"));
  std::visit([&](const auto& one) { check_own(rank, one); }, optimizer);
}

double lr_of(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& one) {
        if constexpr (requires { one.lr; }) return one.lr;
        return 0.0;
      },
      optimizer);
}

double weight_decay_of(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& one) {
        if constexpr (requires { one.weight_decay; }) return one.weight_decay;
        return 0.0;
      },
      optimizer);
}

}  // namespace plumb

#include "optim/rules.h"

#include <ATen/ATen.h>

#include <algorithm>

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

// Runs that share everything but memory and count.
struct Call {
  std::vector<at::Tensor> weights, gradients, momenta, means, squares, counts;
  bool first = false;
  double lr = 0.0;
  double weight_decay = 0.0;

  explicit Call(const Operands& run) : first(run.first), lr(run.lr), weight_decay(run.weight_decay) {}
  bool takes(const Operands& run) const {
    return run.first == first && run.lr == lr && run.weight_decay == weight_decay &&
           run.weight.device() == weights[0].device() && run.weight.scalar_type() == weights[0].scalar_type();
  }
  void add(const Operands& run) {
    const auto push = [](std::vector<at::Tensor>& list, const at::Tensor& one) {
      if (one.defined()) list.push_back(one);
    };
    weights.push_back(run.weight);
    gradients.push_back(run.gradient);
    push(momenta, run.momentum);
    push(means, run.mean);
    push(squares, run.square);
    push(counts, run.count);
  }
};

void apply(const AdamW& adam, const Call& call) {
  at::_fused_adamw_(call.weights, call.gradients, call.means, call.squares, {}, call.counts, call.lr, adam.beta1,
                    adam.beta2, call.weight_decay, adam.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void apply(const Adam& adam, const Call& call) {
  at::_fused_adam_(call.weights, call.gradients, call.means, call.squares, {}, call.counts, call.lr, adam.beta1,
                   adam.beta2, call.weight_decay, adam.eps, /*amsgrad=*/false, /*maximize=*/false);
}

void apply(const SGD& sgd, const Call& call) {
  at::_fused_sgd_(call.weights, call.gradients, call.momenta, call.weight_decay, sgd.momentum, call.lr, sgd.dampening,
                  sgd.nesterov, /*maximize=*/false, /*is_first_step=*/call.first);
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

void update(const Optimizer& optimizer, const std::vector<Operands>& runs) {
  if (const auto* rms = std::get_if<RMSprop>(&optimizer)) {
    for (const Operands& run : runs) apply(*rms, run);
    return;
  }
  std::vector<Call> calls;
  for (const Operands& run : runs) {
    auto call = std::ranges::find_if(calls, [&](const Call& known) { return known.takes(run); });
    if (call == calls.end()) call = calls.insert(call, Call(run));
    call->add(run);
  }
  for (const Call& call : calls) {
    std::visit(
        [&](const auto& one) {
          if constexpr (requires { apply(one, call); }) apply(one, call);
        },
        optimizer);
  }
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

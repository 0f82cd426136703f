#include "plumb/engine.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <map>
#include <unordered_map>

#include "engine/impl.h"
#include "engine/owners.h"
#include "grad/manifest.h"
#include "nn/groups.h"
#include "optim/norm.h"
#include "unit/deferred.h"

namespace plumb {
namespace {

// The modules that some plumb::Unit holds. A unit's own parameters are those that no unit inside it holds.
// `own`: of the unit around `module`; null: there is none.
void find_units(const torch::nn::Module& module, std::vector<UnitSpec>& units, std::vector<at::Tensor>* own) {
  auto door = unit::find_door(&module);
  const size_t index = units.size();
  std::vector<at::Tensor> mine;
  if (door) {
    units.push_back({door, {}});
    own = &mine;
  }
  if (own != nullptr) {
    for (const auto& parameter : module.parameters(/*recurse=*/false)) own->push_back(parameter);
  }
  for (const auto& child : module.children()) find_units(*child, units, own);
  if (door) units[index].parameters = std::move(mine);
}

std::vector<UnitSpec> units_of(const torch::nn::Module& module) {
  std::vector<UnitSpec> units;
  find_units(module, units, nullptr);
  std::erase_if(units, [](const UnitSpec& unit) { return unit.parameters.empty(); });
  return units;
}

// By parameter, the first unit that has it.
std::vector<int> assign(const NamedTensors& parameters, const std::vector<UnitSpec>& units) {
  std::unordered_map<const void*, int> first;
  for (size_t i = 0; i < units.size(); ++i) {
    for (const at::Tensor& parameter : units[i].parameters) {
      first.emplace(parameter.unsafeGetTensorImpl(), static_cast<int>(i));
    }
  }
  std::vector<int> result;
  for (const auto& [name, parameter] : parameters) {
    const auto it = first.find(parameter.unsafeGetTensorImpl());
    result.push_back(it == first.end() ? -1 : it->second);
  }
  return result;
}

// A tensor registered under several names (tied weights) is one parameter, under its first name.
NamedTensors distinct(const torch::OrderedDict<std::string, at::Tensor>& named) {
  NamedTensors result;
  std::unordered_map<const void*, bool> seen;
  for (const auto& item : named) {
    if (item.value().defined() && seen.emplace(item.value().unsafeGetTensorImpl(), true).second) {
      result.emplace_back(item.key(), item.value());
    }
  }
  return result;
}

void check_options(int rank, int size, const Options& options) {
  const Strategy& row = strategy(options.strategy);
  const Mesh mesh = mesh_of(row, options.mesh, size);
  if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0) {
    throw Error(rank, "the bucket caps are " + std::to_string(options.first_bucket_bytes) + " and " +
                          std::to_string(options.bucket_bytes) + " bytes; both must be positive");
  }
  if (options.clip_norm && !(*options.clip_norm > 0)) {
    throw Error(rank, "clip_norm is " + std::to_string(*options.clip_norm) + "; it must be positive, or unset");
  }
  if (const auto& scale = options.loss_scale;
      scale &&
      !(scale->initial > 0 && scale->growth >= 1 && scale->backoff > 0 && scale->backoff < 1 && scale->interval > 0)) {
    throw Error(rank, "loss_scale needs initial > 0, growth >= 1, backoff between 0 and 1, and interval > 0");
  }
  if (options.deterministic) {
    const int shares = options.virtual_ranks;
    const auto power_of_two = [](int n) { return n > 0 && (n & (n - 1)) == 0; };
    if (shares < 1 || shares % size != 0 || !(power_of_two(size) || shares == size) ||
        !(power_of_two(mesh.replicate) || mesh.shard == 1)) {
      throw Error(rank,
                  "deterministic mode cuts the batch into " + std::to_string(shares) +
                      " shares (virtual_ranks) as a binary tree, which " + std::to_string(size) +
                      " ranks cannot share evenly; choose virtual_ranks as a multiple of the ranks, and the ranks "
                      "as a power of two");
    }
  }
  if (options.accumulate_dtype && !at::isFloatingType(*options.accumulate_dtype)) {
    throw Error(rank,
                c10::str("accumulate_dtype is ", *options.accumulate_dtype, "; it must be a floating-point dtype"));
  }
}

}  // namespace

Engine::Impl::Impl(World the_world, NamedTensors the_parameters, NamedTensors the_buffers, std::vector<UnitSpec> specs,
                   Optimizer optimizer, Options the_options)
    : world(std::move(the_world)), options(std::move(the_options)), parameters(std::move(the_parameters)),
      buffers(std::move(the_buffers)), updater(world.rank(), optimizer, options, parameters) {
  check_options(world.rank(), world.size(), options);
  if (options.loss_scale) loss_scale = options.loss_scale->initial;
  // A rank that finds its own model wanting tells the others before it leaves.
  std::exception_ptr failure;
  try {
    check_model(world.rank(), parameters);
    Owners::all().claim(world.rank(), parameters, this);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    check_together(world, failure);
    check_same_model(world, parameters, buffers, optimizer, options);
    const Strategy& row = strategy(options.strategy);
    const bool sharded =
        row.parameter == Placement::sharded && mesh_of(row, options.mesh, world.size()).shard > 1 && !specs.empty();
    if (row.parameter == Placement::sharded && specs.empty() && world.size() > 1 && world.rank() == 0) {
      TORCH_WARN(
          "plumb: strategy '", options.strategy, "' shards the parameters of units, and this model has none: every ",
          "parameter stays whole. Hold modules as plumb::Unit<...>; one that is only passed on, to a Sequential say, ",
          "is none.");
    }
    if (!sharded) specs.clear();
    const std::vector<int> unit_of = assign(parameters, specs);
    reducer = std::make_shared<Reducer>(world, parameters, unit_of, options);
    const Where where{Where::Kind::setup, 0, 0, "the broadcast of rank 0's parameters"};
    NamedTensors built;
    for (const auto& parameter : parameters) {
      if (!deferred::waits(parameter.second)) built.push_back(parameter);
    }
    broadcast(built, where);
    // A deferred parameter that no unit keeps is whole from here on.
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor parameter = parameters[i].second;
      if (unit_of[i] >= 0 || !deferred::waits(parameter)) continue;
      parameter.set_data(deferred::restore(parameters[i].first, parameter, world, reducer->data()).clone());
    }
    broadcast(buffers, where);
    if (std::holds_alternative<NoOptimizer>(optimizer)) reducer->leave_parameters_to_user();
    reducer->start();
    if (sharded) {
      units = std::make_shared<Units>(std::move(specs), reducer);
      units->open_doors();
    }
  } catch (...) {
    Owners::all().release(this);
    throw;
  }
}

Engine::Impl::~Impl() {
  reducer->stop();
  Owners::all().release(this);
}

void Engine::Impl::broadcast(const NamedTensors& tensors, const Where& where) {
  Group& group = reducer->data();
  if (group.size() == 1 || tensors.empty()) return;
  at::NoGradGuard no_grad;
  // Together, so that few messages travel, and not all at once, so that no second model is held.
  constexpr size_t together = 8 << 20;  // bytes
  auto send = [&](const std::vector<at::Tensor>& members) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& member : members) flat.push_back(member.detach().reshape(-1));
    const at::Tensor joined = at::cat(flat);
    const bool odd = joined.scalar_type() == at::kBool;  // not every backend carries booleans
    group.broadcast(odd ? joined.view(at::kByte) : joined, 0).wait(where);
    if (group.rank() == 0) return;
    int64_t offset = 0;
    for (const at::Tensor& member : members) {
      member.detach().copy_(joined.narrow(0, offset, member.numel()).view(member.sizes()));
      offset += member.numel();
    }
  };
  struct Batch {
    std::vector<at::Tensor> members;
    size_t bytes = 0;
  };
  std::map<at::ScalarType, Batch> batches;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    Batch& batch = batches[tensor.scalar_type()];
    batch.members.push_back(tensor);
    batch.bytes += tensor.nbytes();
    if (batch.bytes < together) continue;
    send(batch.members);
    batch = {};
  }
  for (const auto& [dtype, batch] : batches) {
    if (!batch.members.empty()) send(batch.members);
  }
}

// What rank 0 wrote becomes everybody's.
void Engine::Impl::publish(const std::vector<at::Tensor>& changed) {
  NamedTensors whole;
  for (const at::Tensor& parameter : changed) {
    if (!units || !units->owns(parameter)) whole.emplace_back("", parameter);
  }
  broadcast(whole, reducer->here(Where::Kind::step, "publishing what rank 0 wrote"));
  if (units) units->publish(changed);
}

Engine::Engine(World world, torch::nn::Module& module, Optimizer optimizer, Options options)
    : impl_(std::make_unique<Impl>(std::move(world), distinct(module.named_parameters()),
                                   distinct(module.named_buffers()), units_of(module), std::move(optimizer),
                                   std::move(options))) {}

Engine::Engine(World world, NamedTensors parameters, NamedTensors buffers, Optimizer optimizer, Options options)
    : impl_(std::make_unique<Impl>(std::move(world), std::move(parameters), std::move(buffers), std::vector<UnitSpec>{},
                                   std::move(optimizer), std::move(options))) {}

Engine::~Engine() = default;

void Engine::backward(const at::Tensor& loss, bool retain_graph) {
  Reducer& reducer = *impl_->reducer;
  reducer.begin_backward();
  try {
    if (loss.defined() && loss.requires_grad()) scale(loss).backward({}, retain_graph);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    reducer.end_backward(failure);
    std::rethrow_exception(failure);
  }
  reducer.end_backward(nullptr);
}

at::Tensor Engine::scale(const at::Tensor& loss) const {
  return impl_->options.loss_scale ? loss * impl_->loss_scale : loss;
}

// One decision for all ranks: they all know whether the step was skipped.
void Engine::Impl::settle_scale(bool skipped) {
  const LossScale& rule = *options.loss_scale;
  if (skipped) {
    loss_scale *= rule.backoff;
    good_steps = 0;
  } else if (++good_steps == rule.interval) {
    loss_scale *= rule.growth;
    good_steps = 0;
  }
}

StepInfo Engine::step() {
  Reducer& reducer = *impl_->reducer;
  nn::raise_complaint(impl_->world.rank());
  const bool pieces = reducer.shards(reducer.row().gradient);
  reducer.settle_step();
  StepInfo info;
  info.step = reducer.steps();
  const double factor = impl_->options.schedule.factor(info.step);
  info.lr = impl_->updater.lr() * factor;
  info.loss_scale = impl_->loss_scale;
  if (impl_->options.loss_scale || (impl_->options.deterministic && impl_->options.clip_norm)) {
    reducer.for_devices([&](c10::Device device) {
      if (!capturing(device)) return;
      throw Error(impl_->world.rank(), std::string("step() cannot be captured into a graph with ") +
                                           (impl_->options.loss_scale ? "loss scaling" : "deterministic clipping") +
                                           ": the host decides by numbers of the device");
    });
  }
  if (impl_->options.loss_scale) {
    info.skipped = !gradients_are_finite(reducer.buckets(), pieces, reducer.shard(),
                                         reducer.here(Where::Kind::step, "whether all gradients are finite"));
    impl_->settle_scale(info.skipped);
    if (info.skipped) {
      for (const Sink& sink : reducer.sinks()) reducer.ledger().consumed(sink.index);
      reducer.ledger().close_step(std::vector<bool>(reducer.sinks().size(), false));
      reducer.finish_step();
      return info;
    }
    scale_gradients(reducer.buckets(), at::scalar_tensor(1.0 / info.loss_scale, at::kDouble));
  }
  const Where norm_at = reducer.here(Where::Kind::step, "the gradient norm");
  if (impl_->options.clip_norm) {
    info.grad_norm = gradient_norm(reducer.buckets(), pieces, reducer.shard(),
                                   impl_->options.deterministic ? NormOrder::exact : NormOrder::any, norm_at);
    clip_gradients(reducer.buckets(), info.grad_norm, *impl_->options.clip_norm);
  }
  std::vector<bool> active;
  for (const Sink& sink : reducer.sinks()) active.push_back(sink.grad().defined());
  if (impl_->units) impl_->units->begin_update();
  impl_->updater.step(reducer.buckets(), reducer.shard(), factor, reducer.ledger(), reducer.fault,
                      reducer.here(Where::Kind::step, "the updated parameters"));
  if (impl_->units) impl_->units->end_update();
  reducer.ledger().close_step(active);
  impl_->broadcast(impl_->buffers, reducer.here(Where::Kind::step, "the broadcast of rank 0's buffers"));
  reducer.finish_step();
  return info;
}

at::Tensor Engine::full_parameter(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  const Gathered scope = gathered({parameter});
  return parameter.detach().clone();
}

Gathered Engine::gathered(std::vector<at::Tensor> parameters, Access access) {
  return Gathered(*this, std::move(parameters), access);
}

Gathered::Gathered(Engine& engine, std::vector<at::Tensor> parameters, Access access)
    : engine_(engine), parameters_(std::move(parameters)), access_(access), exceptions_(std::uncaught_exceptions()) {
  if (engine_.impl().units) engine_.impl().units->hold(parameters_);
  for (const at::Tensor& parameter : parameters_) versions_.push_back(parameter._version());
}

Gathered::~Gathered() noexcept(false) {
  Engine::Impl& impl = engine_.impl();
  const bool unwinding = std::uncaught_exceptions() > exceptions_;
  std::string changed;
  if (access_ == Access::read && !unwinding && impl.units) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i]._version() == versions_[i] || !impl.units->owns(parameters_[i])) continue;
      for (const auto& [name, parameter] : impl.parameters) {
        if (parameter.is_same(parameters_[i])) changed = name;
      }
    }
  }
  std::exception_ptr failure;
  try {
    if (access_ == Access::write && !unwinding) impl.publish(parameters_);
  } catch (...) {
    failure = std::current_exception();
  }
  if (impl.units) impl.units->let_go(parameters_);
  if (failure) std::rethrow_exception(failure);
  if (!changed.empty()) {
    throw Error(impl.world.rank(), "parameter '" + changed +
                                       "' was changed inside engine.gathered({...}) and the change is lost; gather it "
                                       "with Access::write, on every rank");
  }
}

at::Tensor Engine::full_gradient(const at::Tensor& parameter) { return impl_->reducer->full_gradient(parameter); }

void Engine::zero_grad() {
  for (const auto& [name, parameter] : impl_->parameters) parameter.mutable_grad().reset();
  impl_->reducer->let_go_of_gradients();
}

void Engine::set_lr(double lr) { impl_->updater.set_lr(lr); }

const World& Engine::world() const { return impl_->world; }
const Options& Engine::options() const { return impl_->options; }

NoSync::NoSync(Engine& engine) : engine_(engine) { engine_.impl_->reducer->hold_sync(+1); }
NoSync::~NoSync() { engine_.impl_->reducer->hold_sync(-1); }

}  // namespace plumb

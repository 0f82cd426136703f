#include "plumb/engine.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <cstdlib>
#include <map>
#include <string_view>
#include <unordered_map>

#include "backend/machines.h"
#include "engine/impl.h"
#include "engine/owners.h"
#include "engine/saving.h"
#include "grad/backward.h"
#include "grad/manifest.h"
#include "grad/mode.h"
#include "unit/deferred.h"
#include "watch/road.h"

namespace plumb {
namespace {

// The modules that some plumb::Unit holds. A unit's own parameters are those that no unit inside it holds.
// `own`: of the unit around `module`, or, outside of all, those of no unit.
void find_units(const torch::nn::Module& module, std::vector<UnitSpec>& units, std::vector<at::Tensor>* own) {
  auto door = unit::find_door(&module);
  const size_t index = units.size();
  std::vector<at::Tensor> mine;
  if (door) {
    units.push_back({door, {}});
    own = &mine;
  }
  for (const auto& parameter : module.parameters(/*recurse=*/false)) own->push_back(parameter);
  for (const auto& child : module.children()) find_units(*child, units, own);
  if (door) units[index].parameters = std::move(mine);
}

// A parameter that is registered outside of all units, too, is used there without a gather: it stays whole.
std::vector<UnitSpec> units_of(const torch::nn::Module& module) {
  std::vector<UnitSpec> units;
  std::vector<at::Tensor> outside;
  find_units(module, units, &outside);
  for (UnitSpec& unit : units) {
    std::erase_if(unit.parameters, [&](const at::Tensor& parameter) {
      return std::any_of(outside.begin(), outside.end(), [&](const at::Tensor& o) { return o.is_same(parameter); });
    });
  }
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

// Also for those whose options somebody else sets: programs behind the names of others.
bool asks_by_environment() {
  const char* text = std::getenv("PLUMB_ASK_BEFORE_GATHERS");
  return text != nullptr && std::string_view(text) == "1";
}

// Where nobody chose one: what replicates does so between machines, and shards inside of them.
Mesh mesh_by_machine(const World& world, const Options& options) {
  Mesh mesh = options.mesh;
  const int each = ranks_per_machine(world);
  const bool chosen = mesh.replicate != 0 || mesh.shard != 0;
  if (!chosen && strategy(options.strategy).replicate > 1 && each > 1 && each < world.size()) {
    mesh.replicate = world.size() / each;
  }
  return mesh;
}

void check_options(int rank, int size, const Options& options) {
  const Strategy& row = strategy(options.strategy);
  const Mesh mesh = mesh_of(row, options.mesh, size);
  if (options.gather_ahead_bytes < 0) {
    throw Error(rank, "gather_ahead_bytes is " + std::to_string(options.gather_ahead_bytes) +
                          "; it must be 0 (the next unit alone) or more");
  }
  if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0) {
    throw Error(rank, "the bucket caps are " + std::to_string(options.first_bucket_bytes) + " and " +
                          std::to_string(options.bucket_bytes) + " bytes; both must be positive");
  }
  if (options.clip_norm && !(*options.clip_norm > 0)) {
    throw Error(rank, "clip_norm is " + std::to_string(*options.clip_norm) + "; it must be positive, or unset");
  }
  if (const auto& scale = options.loss_scale;
      scale && !(scale->initial > 0 && scale->growth >= 1 && scale->backoff > 0 && scale->backoff < 1 &&
                 scale->interval > 0 && scale->minimum >= 0 && scale->hysteresis >= 1 && scale->delay >= 0)) {
    throw Error(rank,
                "loss_scale needs initial > 0, growth >= 1, backoff between 0 and 1, interval > 0, minimum >= 0, "
                "hysteresis >= 1 and delay >= 0");
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
      buffers(std::move(the_buffers)), scaler(options.loss_scale) {
  const TrainingMode training;
  // A rank that finds its own model or options wanting tells the others before it leaves.
  std::exception_ptr failure;
  try {
    road_of(world).pass(Point::setup);
    options.mesh = mesh_by_machine(world, options);
    options.ask_before_gathers = options.ask_before_gathers || asks_by_environment();
    check_options(world.rank(), world.size(), options);
    updater.emplace(world.rank(), optimizer, options, parameters);
    check_model(world.rank(), parameters);
    Owners::all().claim(world.rank(), parameters, this);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    check_together(world, failure);
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
    check_same_model(world, parameters, unit_of, buffers, optimizer, options);
    reducer = std::make_shared<Reducer>(world, parameters, unit_of, options);
    reducer->on_open = [this] { scaler.begin_pass(reducer->buckets()); };
    const Where where{Where::Kind::setup, 0, 0, "the broadcast of rank 0's parameters"};
    road_of(world).pass(Point::setup);
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
  saving.reset();
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
      const at::Tensor theirs = joined.narrow(0, offset, member.numel()).view(member.sizes());
      // A buffer that was made under InferenceMode can be written only there.
      std::optional<c10::InferenceMode> mode;
      if (member.is_inference()) mode.emplace();
      // A graph that was built before may have saved it: what is equal already is not written. A device's host would have to
      // wait for the answer.
      if (!member.is_cpu() || !member.detach().equal(theirs)) member.detach().copy_(theirs);
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
  const Where where = reducer->agree_to_write(changed);
  broadcast(whole, where);
  if (units) units->publish(changed, where);
}

Engine::Engine(World world, torch::nn::Module& module, Optimizer optimizer, Options options)
    : impl_(std::make_unique<Impl>(std::move(world), distinct(module.named_parameters()),
                                   distinct(module.named_buffers()), units_of(module), std::move(optimizer),
                                   std::move(options))) {}

Engine::Engine(World world, NamedTensors parameters, NamedTensors buffers, Optimizer optimizer, Options options)
    : impl_(std::make_unique<Impl>(std::move(world), std::move(parameters), std::move(buffers), std::vector<UnitSpec>{},
                                   std::move(optimizer), std::move(options))) {}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() = default;

void Engine::backward(const at::Tensor& loss, bool retain_graph, std::optional<double> weight) {
  const TrainingMode training;
  Reducer& reducer = *impl_->reducer;
  if (weight) Weights::check(impl_->world.rank(), *weight);  // before it counts as a backward
  impl_->scales = true;
  reducer.begin_backward();
  std::exception_ptr failure;
  backward::Outermost outermost;
  try {
    if (loss.defined() && loss.is_inference()) {
      throw Error(impl_->world.rank(),
                  "engine.backward() of a loss that was computed under InferenceMode, which records no graph; compute "
                  "it outside, or pass an undefined tensor where there is nothing to contribute");
    }
    if (weight) reducer.weigh(*weight);
    if (loss.defined() && loss.requires_grad()) scale(loss).backward({}, retain_graph);
  } catch (...) {
    failure = std::current_exception();
  }
  failure = outermost.end(failure);
  reducer.end_backward(failure);
  if (failure) std::rethrow_exception(failure);
}

at::Tensor Engine::scale(const at::Tensor& loss) const {
  const TrainingMode training;
  impl_->scales = true;
  return impl_->scaler.scaled(loss);
}

double Engine::loss_scale() const {
  impl_->scales = true;  // who asks may multiply by himself: losses, or gradients to deliver
  return impl_->scaler.scale();
}

at::Tensor Engine::full_parameter(const at::Tensor& parameter) {
  const TrainingMode training;
  at::NoGradGuard no_grad;
  const Gathered scope = gathered({parameter});
  return parameter.detach().clone();
}

Gathered Engine::gathered(std::vector<at::Tensor> parameters, Access access) {
  return Gathered(*this, std::move(parameters), access);
}

Gathered::Gathered(Engine& engine, std::vector<at::Tensor> parameters, Access access)
    : engine_(engine), parameters_(std::move(parameters)), access_(access), exceptions_(std::uncaught_exceptions()) {
  const TrainingMode training;
  if (engine_.impl().units) engine_.impl().units->hold(parameters_);
  for (const at::Tensor& parameter : parameters_) versions_.push_back(parameter._version());
}

// NOLINTNEXTLINE(bugprone-unsafe-to-allow-exceptions): throws only where no other exception is under way
Gathered::~Gathered() noexcept(false) {
  const TrainingMode training;
  Engine::Impl& impl = engine_.impl();
  const bool unwinding = std::uncaught_exceptions() > exceptions_;
  std::string changed;
  if (access_ == Access::read && !unwinding && impl.units) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i]._version() == versions_[i] || !impl.units->owns(parameters_[i])) continue;
      if (impl.units->is_everybodys(parameters_[i])) continue;  // written by a scope inside of this one
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

NamedTensors Engine::shards() const { return impl_->units ? impl_->units->shards() : NamedTensors{}; }

void Engine::shards_written() {
  const TrainingMode training;
  if (impl_->units) impl_->units->shards_written();
}

at::Tensor Engine::full_gradient(const at::Tensor& parameter) {
  const TrainingMode training;
  return impl_->reducer->full_gradient(parameter);
}

void Engine::zero_grad() {
  const TrainingMode training;
  if (impl_->reducer->pass_open() && torch::autograd::get_current_graph_task_id() < 0) {
    throw Error(
        impl_->world.rank(),
        "zero_grad() between the backwards of one pass, whose gradients may be on their way already; call it before "
        "engine.pass(), or after its scope (after end_pass() where gradients were delivered)");
  }
  if (impl_->reducer->has_taken_in()) {
    throw Error(
        impl_->world.rank(),
        "zero_grad() inside a backward, some of whose gradients are in a sum already, as they are where gradients "
        "are sharded, and in deterministic mode; call it before backward(), or after it has returned");
  }
  for (const auto& [name, parameter] : impl_->parameters) parameter.mutable_grad().reset();
  impl_->reducer->gradients_cleared();
}

double Engine::share_weight() const {
  return impl_->options.deterministic ? static_cast<double>(impl_->world.size()) / impl_->options.virtual_ranks : 1.0;
}

const World& Engine::world() const { return impl_->world; }
const Options& Engine::options() const { return impl_->options; }

NoSync::NoSync(Engine& engine) : engine_(engine) { engine_.impl_->reducer->hold_sync(+1); }
NoSync::~NoSync() { engine_.impl_->reducer->hold_sync(-1); }

Pass::Pass(Engine& engine) : engine_(engine), exceptions_(std::uncaught_exceptions()) {
  engine_.impl_->reducer->begin_backward();
}

// NOLINTNEXTLINE(bugprone-unsafe-to-allow-exceptions): throws only where no other exception is under way
Pass::~Pass() noexcept(false) {
  Reducer& reducer = *engine_.impl_->reducer;
  if (std::uncaught_exceptions() == exceptions_) {
    reducer.end_backward(nullptr);
    return;
  }
  try {
    // Nobody waits for this rank, and every rank hears of it.
    reducer.end_backward(
        std::make_exception_ptr(Error(engine_.impl_->world.rank(), "a pass was left by an exception")));
  } catch (...) {  // the user's own goes on
  }
}

}  // namespace plumb

#include "scenarios/support/stage.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/impl.h"
#include "slowness.h"
#include "world/world_impl.h"

namespace plumb::scenarios {

// One rank of the reference runs at a time, in rank order, from one meeting to the next.
class Baton {
 public:
  explicit Baton(int ranks) : alive_(ranks, true) {}

  void begin(int rank) {
    std::unique_lock lock(mutex_);
    wait_turn(lock, rank);
  }

  // When the last rank that is still playing has come, it does the action, and the first one goes on.
  void meet(int rank, const std::function<void()>& action) {
    std::unique_lock lock(mutex_);
    if (next(rank) <= rank) {
      lock.unlock();
      action();
      lock.lock();
    }
    turn_ = next(rank);
    changed_.notify_all();
    wait_turn(lock, rank);
  }

  void end(int rank) {
    std::unique_lock lock(mutex_);
    alive_[rank] = false;
    turn_ = next(rank);
    changed_.notify_all();
  }

 private:
  int next(int rank) const {
    const int n = static_cast<int>(alive_.size());
    for (int i = 1; i <= n; ++i) {
      if (alive_[(rank + i) % n]) return (rank + i) % n;
    }
    return rank;
  }
  void wait_turn(std::unique_lock<std::mutex>& lock, int rank) {
    changed_.wait(lock, [&] { return turn_ == rank; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> alive_;
  int turn_ = 0;
};

namespace {

constexpr uint64_t kSeed = 20240517;

Outcome outcome_of(const torch::nn::Module& model, Engine* engine = nullptr) {
  Outcome outcome;
  for (const auto& item : model.named_parameters()) {
    outcome.parameters.emplace_back(
        item.key(), engine != nullptr ? engine->full_parameter(item.value()) : item.value().detach().clone());
    const at::Tensor grad = engine != nullptr ? engine->full_gradient(item.value()) : item.value().grad();
    outcome.gradients.emplace_back(item.key(), grad.defined() ? grad.detach().clone() : grad);
  }
  for (const auto& item : model.named_buffers()) outcome.parameters.emplace_back(item.key(), item.value().clone());
  return outcome;
}

std::shared_ptr<torch::nn::Module> build(const Scenario& scenario) {
  static std::mutex generator;  // the default generator is the process's
  std::lock_guard lock(generator);
  torch::manual_seed(kSeed);
  return scenario.build();
}

std::unique_ptr<torch::optim::Optimizer> reference_optimizer(const Scenario& scenario, torch::nn::Module& model) {
  std::vector<at::Tensor> parameters;
  std::vector<const void*> seen;
  for (auto& parameter : model.parameters()) {
    if (std::find(seen.begin(), seen.end(), parameter.unsafeGetTensorImpl()) != seen.end()) continue;
    seen.push_back(parameter.unsafeGetTensorImpl());
    parameters.push_back(parameter);
  }
  const auto add_groups = [&](auto optimizer, auto base) {
    const Options& options = scenario.options;
    for (size_t i = 0; i < options.groups.size(); ++i) {
      const ParameterGroup& group = options.groups[i];
      auto own = base;
      if (group.lr) own.lr(*group.lr);
      if (group.weight_decay) own.weight_decay(*group.weight_decay);
      std::vector<at::Tensor> members;
      for (const auto& item : model.named_parameters()) {
        const auto first = std::ranges::find_if(options.groups, [&](const auto& g) { return g.match(item.key()); });
        if (first == options.groups.begin() + static_cast<std::ptrdiff_t>(i)) members.push_back(item.value());
      }
      for (const at::Tensor& member : members) {
        std::erase_if(optimizer->param_groups()[0].params(), [&](const at::Tensor& p) { return p.is_same(member); });
      }
      optimizer->add_param_group({members, std::make_unique<decltype(own)>(own)});
      // libtorch takes a decay of 0 for one that was not set.
      static_cast<decltype(own)&>(optimizer->param_groups().back().options()).weight_decay(own.weight_decay());
    }
    return optimizer;
  };
  if (const auto* adam = std::get_if<AdamW>(&scenario.optimizer)) {
    const auto options = torch::optim::AdamWOptions(adam->lr)
                             .betas({adam->beta1, adam->beta2})
                             .eps(adam->eps)
                             .weight_decay(adam->weight_decay);
    return add_groups(std::make_unique<torch::optim::AdamW>(parameters, options), options);
  }
  const auto& sgd = std::get<SGD>(scenario.optimizer);
  const auto options = torch::optim::SGDOptions(sgd.lr)
                           .momentum(sgd.momentum)
                           .dampening(sgd.dampening)
                           .weight_decay(sgd.weight_decay)
                           .nesterov(sgd.nesterov);
  return add_groups(std::make_unique<torch::optim::SGD>(parameters, options), options);
}

}  // namespace

at::Tensor Stage::input(at::IntArrayRef shape, int micro) const {
  auto generator = at::detail::createCPUGenerator(kSeed + 7919 * micro + 104729 * (rank + 1));
  return at::randn(shape, generator).to(device);
}

at::Tensor Stage::share(const at::Tensor& loss) const { return reference() ? loss / size : loss; }

void Stage::all(const std::function<void()>& action) {
  if (baton != nullptr) {
    baton->meet(rank, action);
  } else {
    action();
  }
}

void Stage::step() {
  if (reference()) {
    baton->meet(rank, reference_step);
  } else {
    engine->step();
  }
}

void Stage::backward(const at::Tensor& loss, bool retain_graph) {
  if (!reference()) return engine->backward(loss, retain_graph);
  if (loss.defined() && loss.requires_grad()) loss.backward({}, retain_graph);
}

std::unique_ptr<NoSync> Stage::no_sync() { return reference() ? nullptr : std::make_unique<NoSync>(*engine); }

void Stage::deliver(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (!reference()) return engine->deliver(parameter, gradient);
  at::NoGradGuard no_grad;
  const auto rule = parameter.grad_dtype();
  const at::Tensor share = (rule ? gradient.to(*rule) : gradient) / size;
  at::Tensor& mine = parameter.mutable_grad();
  mine = mine.defined() ? mine + share : share;
}

void Stage::end_pass() {
  if (!reference()) engine->end_pass();
}

at::Tensor Stage::scale(const at::Tensor& loss) const {
  return reference() ? loss * *reference_scale : engine->scale(loss);
}

Outcome play_reference(const Scenario& scenario, int ranks) {
  const auto model = build(scenario);
  const auto optimizer = reference_optimizer(scenario, *model);
  Baton baton(ranks);
  double scale = scenario.options.loss_scale ? scenario.options.loss_scale->initial : 1.0;
  int64_t good = 0, steps = 0;
  std::vector<double> rates;
  for (const auto& group : optimizer->param_groups()) rates.push_back(group.options().get_lr());
  std::vector<std::exception_ptr> thrown(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Stage stage;
      stage.rank = rank;
      stage.size = ranks;
      stage.model = model;
      stage.baton = &baton;
      stage.reference_scale = &scale;
      stage.reference_step = [&] {
        const double factor = scenario.options.schedule.factor(steps++);
        for (size_t i = 0; i < rates.size(); ++i) optimizer->param_groups()[i].options().set_lr(rates[i] * factor);
        if (const auto& rule = scenario.options.loss_scale) {
          bool finite = true;
          for (const auto& p : model->parameters()) {
            finite = finite && (!p.grad().defined() || at::isfinite(p.grad()).all().item<bool>());
          }
          if (!finite) {
            scale *= rule->backoff;
            good = 0;
            return;
          }
          for (const auto& p : model->parameters()) {
            if (p.grad().defined()) p.grad().div_(scale);
          }
          if (++good == rule->interval) scale *= rule->growth, good = 0;
        }
        if (scenario.options.clip_norm) {
          torch::nn::utils::clip_grad_norm_(model->parameters(), *scenario.options.clip_norm);
        }
        optimizer->step();
      };
      baton.begin(rank);
      try {
        scenario.program(stage);
      } catch (...) {
        thrown[rank] = std::current_exception();
      }
      baton.end(rank);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : thrown) {
    if (error) std::rethrow_exception(error);
  }
  return outcome_of(*model);
}

Outcome play_on(const World& world, const Scenario& scenario, const std::string& strategy, at::Device device,
                Medium medium) {
  Stage stage;
  stage.rank = world.rank();
  stage.size = world.size();
  stage.device = device;
  stage.model = build(scenario);
  if (!device.is_cpu()) stage.model->to(device);
  Options options = scenario.options;
  options.strategy = strategy;
  Engine engine(world, *stage.model, scenario.optimizer, options);
  if (medium == Medium::dear) engine.impl().reducer->layout().small = 0;
  if (medium == Medium::asking && engine.impl().units) engine.impl().units->gather_together(options.gather_ahead_bytes);
  stage.clears_by_engine = medium == Medium::dear;
  stage.engine = &engine;
  scenario.program(stage);
  Outcome outcome = outcome_of(*stage.model, &engine);
  for (NamedTensors* all : {&outcome.parameters, &outcome.gradients}) {
    for (auto& [name, tensor] : *all) tensor = tensor.defined() ? tensor.cpu() : tensor;
  }
  return outcome;
}

// Host messages of its engines go as collectives, as over a backend that has none between two ranks.
static void deny_links(World::Impl& world) {
  world.control->has_links = false;
  world.part = [make = world.part](const std::string& name, const std::vector<int>& members, int rank, int index) {
    auto group = make(name, members, rank, index);
    group->has_links = false;
    return group;
  };
}

Outcome play_engine(const Scenario& scenario, int ranks, const std::string& strategy, int of, Medium medium) {
  Outcome outcome;
  run_local(ranks,
            [&](World world) {
              if (medium == Medium::dear && ranks > 1) world.impl().data->native_reduce_scatter = false;
              if (medium == Medium::asking && ranks > 1) deny_links(world.impl());
              Outcome mine = play_on(world, scenario, strategy, at::kCPU, medium);
              if (world.rank() == of) outcome = std::move(mine);
            },
            {.timeout = std::chrono::seconds(20 * patience)});
  return outcome;
}

std::string difference(const Outcome& expected, const Outcome& found, double tolerance) {
  auto compare = [&](const char* what, const NamedTensors& want, const NamedTensors& have) -> std::string {
    if (want.size() != have.size()) return c10::str(what, "s: ", have.size(), " instead of ", want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      const auto& [name, expected_value] = want[i];
      const at::Tensor& value = have[i].second;
      if (expected_value.defined() != value.defined()) {
        return c10::str(what, " '", name, "' is ", value.defined() ? "there" : "missing", ", the reference's is ",
                        expected_value.defined() ? "there" : "missing");
      }
      if (!value.defined() || value.numel() == 0) continue;
      const auto wide = value.is_complex() ? at::kComplexDouble : at::kDouble;
      const at::Tensor a = expected_value.is_sparse() ? expected_value.to_dense().to(wide) : expected_value.to(wide);
      const double scale = a.abs().max().item<double>() + 1e-6;
      const double error = (value.to(wide) - a).abs().max().item<double>() / scale;
      if (!(error <= tolerance)) return c10::str(what, " '", name, "' differs by ", error, " of ", scale);
    }
    return {};
  };
  std::string result = compare("parameter", expected.parameters, found.parameters);
  if (result.empty()) result = compare("gradient", expected.gradients, found.gradients);
  return result;
}

}  // namespace plumb::scenarios

// Binds plumb/engine.h.
#include "plumb/engine.h"

#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <algorithm>

#include "bind.h"
#include "engine/impl.h"
#include "engine/outputs.h"
#include "flat.h"
#include "grad/piece.h"
#include "unit/inside.h"
#include "unit/units.h"
#include "watch/timeline.h"

namespace plumb::python {
namespace {

using namespace py::literals;
using DoorPtr = std::shared_ptr<unit::Door>;

using Units = std::vector<std::pair<DoorPtr, std::vector<at::Tensor>>>;

std::unique_ptr<EngineObject> build(WorldObject& world, NamedTensors parameters, NamedTensors buffers,
                                    const Units& units, const Optimizer& optimizer, const Options& options) {
  World place = *world;
  settle_autograd();  // users' threads come later
  py::gil_scoped_release released;
  std::vector<UnitSpec> specs;
  for (const auto& [door, own] : units) specs.push_back({door, own});
  return std::make_unique<EngineObject>(std::make_unique<Engine>(std::make_unique<Engine::Impl>(
      std::move(place), std::move(parameters), std::move(buffers), std::move(specs), optimizer, options)));
}

std::optional<at::Tensor> or_none(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

const Sink& sink_of_parameter(Engine& engine, const at::Tensor& parameter) {
  for (const Sink& sink : engine.impl().reducer->sinks()) {
    if (sink.parameter.is_same(parameter)) return sink;
  }
  throw Error(engine.world().rank(), "a tensor that is none of the engine's parameters");
}

// What this rank's optimizer updates of a parameter, as a range of its elements in the order of their memory.
std::pair<int64_t, int64_t> updated_range(Engine& engine, const at::Tensor& parameter) {
  const Sink& sink = sink_of_parameter(engine, parameter);
  const Bucket& bucket = engine.impl().reducer->buckets()[static_cast<size_t>(sink.slot.bucket)];
  const Range mine = overlap(sink.slot, parameter.numel(), bucket.updated);
  return {mine.begin - sink.slot.offset, mine.end - sink.slot.offset};
}

// The whole of something that each rank has its updated_range of: a master weight, a moment. Collective where it is cut.
at::Tensor assemble(Engine& engine, const at::Tensor& parameter, const at::Tensor& mine) {
  at::NoGradGuard no_grad;
  const auto [begin, end] = updated_range(engine, parameter);
  if (mine.numel() != end - begin) {
    throw Error(engine.world().rank(), c10::str("'", sink_of_parameter(engine, parameter).name, "' has ", end - begin,
                                                " elements on this rank, and was given ", mine.numel()));
  }
  Reducer& reducer = *engine.impl().reducer;
  const at::Tensor whole = at::zeros({parameter.numel()}, mine.options());
  whole.narrow(0, begin, end - begin).copy_(mine.reshape(-1));
  if (reducer.shards(reducer.row().state)) {
    reducer.shard().all_reduce(whole).wait(reducer.here(Where::Kind::step, "the parts of a parameter's state"));
  }
  return whole.as_strided(parameter.sizes(), parameter.strides());
}

// Ends a scope whose end may throw. It learns from C++ that it ends by an exception. Where its engine was closed inside
// of it, nothing is left to end.
template <class Scope>
void end_scope(const py::object& engine, std::unique_ptr<Scope>& scope, bool failed) {
  if (py::cast<EngineObject&>(engine).ended()) {
    (void)scope.release();
    return;
  }
  py::gil_scoped_release released;
  if (!failed) {
    delete scope.release();
    return;
  }
  struct Unwinding {};
  try {
    const auto ends = std::move(scope);
    throw Unwinding{};
  } catch (const Unwinding&) {
  }
}

// engine.no_sync(), as a context.
class NoSyncObject {
 public:
  explicit NoSyncObject(py::object engine) : engine_(std::move(engine)) {}
  void enter() {
    auto& engine = *py::cast<EngineObject&>(engine_);
    py::gil_scoped_release released;
    scope_ = std::make_unique<NoSync>(engine);
  }
  void exit() { end_scope(engine_, scope_, false); }
  ~NoSyncObject() { exit(); }  // one that nobody left: an exit from the process

 private:
  py::object engine_;
  std::unique_ptr<NoSync> scope_;
};

// engine.one_pass(), as a context.
class PassObject {
 public:
  explicit PassObject(py::object engine) : engine_(std::move(engine)) {}
  void enter() {
    auto& engine = *py::cast<EngineObject&>(engine_);
    py::gil_scoped_release released;
    scope_ = std::make_unique<Pass>(engine);
  }
  void exit(const py::object& failure) { end_scope(engine_, scope_, !failure.is_none()); }

 private:
  py::object engine_;
  std::unique_ptr<Pass> scope_;
};

// engine.gathered(...), as a context.
class GatheredObject {
 public:
  GatheredObject(py::object engine, std::vector<at::Tensor> parameters, Access access)
      : engine_(std::move(engine)), parameters_(std::move(parameters)), access_(access) {}
  void enter() {
    auto& engine = *py::cast<EngineObject&>(engine_);
    py::gil_scoped_release released;
    scope_ = std::make_unique<Gathered>(engine, parameters_, access_);
  }
  void exit(const py::object& failure) { end_scope(engine_, scope_, !failure.is_none()); }

 private:
  py::object engine_;
  std::vector<at::Tensor> parameters_;
  Access access_;
  std::unique_ptr<Gathered> scope_;
};

using TraceObject = Owned<Trace>;

void bind_trace(py::module_& module) {
  const auto stop = [](TraceObject& self) { return (*self).stop(); };
  py::class_<TimeSpent>(module, "TimeSpent")
      .def_readonly("steps", &TimeSpent::steps)
      .def_readonly("step", &TimeSpent::step)
      .def_readonly("compute", &TimeSpent::compute)
      .def_readonly("data", &TimeSpent::data)
      .def_readonly("gathers", &TimeSpent::gathers)
      .def_readonly("control", &TimeSpent::control)
      .def_readonly("optimizer", &TimeSpent::optimizer)
      .def_readonly("waited_for", &TimeSpent::waited_for)
      .def("__repr__", [](const TimeSpent& spent) {
        return c10::str("TimeSpent(steps=", spent.steps, ", step=", spent.step, ", compute=", spent.compute,
                        ", data=", spent.data, ", gathers=", spent.gathers, ", control=", spent.control,
                        ", optimizer=", spent.optimizer, ")");
      });
  py::class_<TraceObject>(module, "Trace")
      .def(py::init([](EngineObject& engine, const std::string& path) {
             return std::make_unique<TraceObject>(std::make_unique<Trace>((*engine).world(), path));
           }),
           "engine"_a, "path"_a, no_gil())
      .def("stop", stop, no_gil())
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [stop](TraceObject& self, const py::object& type, const py::object&, const py::object&) {
        const bool failed = !type.is_none();
        if (failed) return self.end();  // others may not come
        py::gil_scoped_release released;
        stop(self);
      });
}

void use_hook(EngineObject& self, py::object state, py::object hook) {
  std::unique_ptr<c10d::CommHookInterface> asked =
      std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
  Reducer& reducer = *(*self).impl().reducer;
  py::gil_scoped_release released;
  reducer.use_hook(std::move(asked));
}

void bind_options(py::module_& module) {
  py::class_<LossScale>(module, "LossScale")
      .def(py::init([](double initial, double growth, double backoff, int64_t interval, double minimum,
                       int64_t hysteresis, bool consecutive_hysteresis, int64_t delay) {
             using Recovery = LossScale::Recovery;
             return LossScale{initial,
                              growth,
                              backoff,
                              interval,
                              minimum,
                              hysteresis,
                              consecutive_hysteresis ? Recovery::at_a_good_step : Recovery::when_it_grows,
                              delay};
           }),
           "initial"_a = LossScale{}.initial, py::kw_only(), "growth"_a = LossScale{}.growth,
           "backoff"_a = LossScale{}.backoff, "interval"_a = LossScale{}.interval, "minimum"_a = LossScale{}.minimum,
           "hysteresis"_a = LossScale{}.hysteresis, "consecutive_hysteresis"_a = false, "delay"_a = LossScale{}.delay)
      .def_readonly("initial", &LossScale::initial)
      .def_readonly("growth", &LossScale::growth)
      .def_readonly("backoff", &LossScale::backoff)
      .def_readonly("interval", &LossScale::interval)
      .def_readonly("minimum", &LossScale::minimum)
      .def_readonly("hysteresis", &LossScale::hysteresis)
      .def_property_readonly(
          "consecutive_hysteresis",
          [](const LossScale& scale) { return scale.recovery == LossScale::Recovery::at_a_good_step; })
      .def_readonly("delay", &LossScale::delay);
  py::enum_<Cut>(module, "Cut")
      .value("anywhere", Cut::anywhere)
      .value("at_parameters", Cut::at_parameters)
      .value("at_rows", Cut::at_rows);
  py::enum_<NonFinite>(module, "NonFinite")
      .value("proceed", NonFinite::proceed)
      .value("skip", NonFinite::skip)
      .value("error", NonFinite::error);
  py::class_<Options>(module, "Options")
      .def(py::init<>())
      .def_readwrite("strategy", &Options::strategy)
      .def_readwrite("mesh", &Options::mesh)
      .def_readwrite("bucket_bytes", &Options::bucket_bytes)
      .def_readwrite("first_bucket_bytes", &Options::first_bucket_bytes)
      .def_readwrite("accumulate_dtype", &Options::accumulate_dtype)
      .def_readwrite("master_weights", &Options::master_weights)
      .def_readwrite("clip_norm", &Options::clip_norm)
      .def_readwrite("loss_scale", &Options::loss_scale)
      .def_readwrite("nonfinite", &Options::nonfinite)
      .def_readwrite("schedule", &Options::schedule)
      .def_readwrite("groups", &Options::groups)
      .def_readwrite("hold_unsharded", &Options::hold_unsharded)
      .def_readwrite("cut", &Options::cut)
      .def_readwrite("gather_ahead_bytes", &Options::gather_ahead_bytes)
      .def_readwrite("ask_before_gathers", &Options::ask_before_gathers)
      .def_readwrite("deterministic", &Options::deterministic)
      .def_readwrite("virtual_ranks", &Options::virtual_ranks)
      .def_readwrite("ledger", &Options::ledger);
  py::class_<StepInfo>(module, "StepInfo")
      .def_readonly("step", &StepInfo::step)
      .def_readonly("lr", &StepInfo::lr)
      .def_readonly("group_lrs", &StepInfo::group_lrs)
      .def_readonly("skipped", &StepInfo::skipped)
      .def_readonly("loss_scale", &StepInfo::loss_scale)
      .def_property_readonly("grad_norm", [](const StepInfo& info) { return or_none(info.grad_norm); })
      .def("__repr__", [](const StepInfo& info) {
        return c10::str("StepInfo(step=", info.step, ", lr=", info.lr, ", skipped=", info.skipped ? "True" : "False",
                        ", loss_scale=", info.loss_scale, ")");
      });
  py::class_<Piece>(module, "Piece")
      .def_readonly("parameter", &Piece::parameter)
      .def_readonly("begin", &Piece::begin)
      .def_readonly("weight", &Piece::weight)
      .def_property_readonly("gradient", [](const Piece& piece) { return or_none(piece.gradient); });
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_options(module);
  bind_trace(module);
  module.def("is_piece", [](const at::Tensor& tensor) { return piece_of(tensor) != nullptr; }, "tensor"_a);
  module.def("refuse_piece", &refuse_piece, "tensor"_a, "what"_a);
  const auto done = [](auto& self, const py::object&, const py::object&, const py::object&) { self.exit(); };
  py::class_<NoSyncObject>(module, "NoSync")
      .def("__enter__", [](NoSyncObject& self) { self.enter(); })
      .def("__exit__", [done](NoSyncObject& self, const py::object& a, const py::object& b, const py::object& c) {
        done(self, a, b, c);
      });
  py::class_<PassObject>(module, "Pass")
      .def("__enter__", [](PassObject& self) { self.enter(); })
      .def("__exit__",
           [](PassObject& self, const py::object& type, const py::object&, const py::object&) { self.exit(type); });
  py::class_<GatheredObject>(module, "Gathered")
      .def("__enter__", [](GatheredObject& self) { self.enter(); })
      .def("__exit__",
           [](GatheredObject& self, const py::object& type, const py::object&, const py::object&) { self.exit(type); });
  module.def("output_counts", [] {
    const OutputCounts counts = output_counts();
    return std::pair(counts.handed_over, counts.handed_back);
  });
  module.def("graph_gathers", [] {
    const inside::Counts counts = inside::counts();
    return std::tuple(counts.gathers, counts.bytes, counts.most_bytes, counts.ahead);
  });
  module.def("forget_most_gathered", &inside::forget_most);
  using Self = EngineObject;
  py::class_<Self> engine(module, "Engine");
  engine.def(py::init(&build), "world"_a, "parameters"_a, "buffers"_a, "units"_a, "optimizer"_a, "options"_a)
      .def(
          "backward",
          [](Self& self, const std::optional<at::Tensor>& loss, bool retain_graph, std::optional<double> weight) {
            (*self).backward(loss.value_or(at::Tensor()), retain_graph, weight);
          },
          "loss"_a, "retain_graph"_a = false, "weight"_a = py::none(), no_gil())
      .def(
          "deliver", [](Self& self, const at::Tensor& p, const at::Tensor& g) { (*self).deliver(p, g); }, "parameter"_a,
          "gradient"_a, no_gil())
      .def(
          "end_pass", [](Self& self) { (*self).end_pass(); }, no_gil())
      .def(
          "scale", [](Self& self, const at::Tensor& loss) { return (*self).scale(loss); }, "loss"_a, no_gil())
      .def_property_readonly("loss_scale", [](Self& self) { return (*self).loss_scale(); })
      .def(
          "grad_norm", [](Self& self) { return (*self).grad_norm(); }, no_gil())
      .def(
          "step", [](Self& self) { return (*self).step(); }, no_gil())
      .def(
          "follow_buffers", [](Self& self, NamedTensors now) { (*self).impl().buffers = std::move(now); }, "buffers"_a,
          no_gil())
      .def(
          "compare_settings", [](Self& self, Settings settings) { (*self).impl().user_settings = std::move(settings); },
          py::arg("settings"))
      .def("leave_parameters_to_user", [](Self& self) { (*self).impl().reducer->leave_parameters_to_user(); })
      .def("take_parameters_back", [](Self& self) { (*self).impl().reducer->take_parameters_back(); })
      .def(
          "compare_in_backwards",
          [](Self& self, Settings settings) { (*self).impl().reducer->settings_of_backwards = std::move(settings); },
          py::arg("settings"))
      .def(
          "enter",
          [](Self& self, bool updating) {
            timeline_of((*self).world()).enter(updating ? doing::optimizer : doing::forward);
          },
          "updating"_a)
      .def(
          "begin_step", [](Self& self) { return (*self).begin_step(); }, no_gil())
      .def(
          "pieces", [](Self& self) { return (*self).pieces(); }, no_gil())
      .def(
          "end_step", [](Self& self) { (*self).end_step(); }, no_gil())
      .def(
          "shards", [](Self& self) { return (*self).shards(); }, no_gil())
      .def(
          "keep",
          [](Self& self, const std::vector<at::Tensor>& parameters) {
            if (auto& units = (*self).impl().units) units->keep(parameters);
          },
          "parameters"_a, no_gil())
      .def(
          "drop",
          [](Self& self, const std::vector<at::Tensor>& parameters) {
            if (auto& units = (*self).impl().units) units->drop(parameters);
          },
          "parameters"_a, no_gil())
      .def(
          "shards_written", [](Self& self) { (*self).shards_written(); }, no_gil())
      .def(
          "zero_grad", [](Self& self) { (*self).zero_grad(); }, no_gil())
      .def(
          "lr", [](Self& self, std::optional<int> group) { return group ? (*self).lr(*group) : (*self).lr(); },
          "group"_a = py::none(), no_gil())
      .def(
          "set_lr",
          [](Self& self, double lr, std::optional<int> group) {
            if (group) {
              (*self).set_lr(*group, lr);
            } else {
              (*self).set_lr(lr);
            }
          },
          "lr"_a, "group"_a = py::none(), no_gil())
      .def("share_weight", [](Self& self) { return (*self).share_weight(); })
      .def(
          "full_parameter", [](Self& self, const at::Tensor& p) { return (*self).full_parameter(p); }, "parameter"_a,
          no_gil())
      .def(
          "full_gradient", [](Self& self, const at::Tensor& p) { return or_none((*self).full_gradient(p)); },
          "parameter"_a, no_gil())
      .def_property_readonly("holds",
                             [](Self& self) {
                               Reducer& reducer = *(*self).impl().reducer;
                               py::gil_scoped_release released;
                               return reducer.holds();
                             })
      .def_property_readonly("rebuilt",
                             [](Self& self) {
                               Reducer& reducer = *(*self).impl().reducer;
                               py::gil_scoped_release released;
                               return reducer.rebuilt();
                             })
      .def_property_readonly("bucket_bytes",
                             [](Self& self) {
                               std::vector<int64_t> bytes;
                               for (const Bucket& bucket : (*self).impl().reducer->buckets())
                                 bytes.push_back(bucket.numel * static_cast<int64_t>(c10::elementSize(bucket.dtype)));
                               return bytes;
                             })
      .def(
          "sit_out", [](Self& self) { (*self).impl().reducer->sit_out(); }, no_gil())
      .def("use_hook", &use_hook, "state"_a, "hook"_a)
      .def(
          "divide_by", [](Self& self, int ranks) { (*self).impl().reducer->divide_by(ranks); }, "ranks"_a, no_gil())
      .def(
          "updated_range", [](Self& self, const at::Tensor& p) { return updated_range(*self, p); }, "parameter"_a,
          no_gil())
      .def(
          "assemble", [](Self& self, const at::Tensor& p, const at::Tensor& mine) { return assemble(*self, p, mine); },
          "parameter"_a, "mine"_a, no_gil())
      .def_property_readonly("gathers",
                             [](Self& self) {
                               auto& impl = (*self).impl();
                               return impl.units ? impl.units->gathers() : int64_t{0};
                             })
      .def_property_readonly("reductions",
                             [](Self& self) {  // buckets whose reduction has begun in this pass, and all
                               const auto& buckets = (*self).impl().reducer->buckets();
                               return std::pair(std::ranges::count_if(buckets, &Bucket::launched), buckets.size());
                             })
      .def_property_readonly("gathered_bytes",
                             [](Self& self) {
                               auto& impl = (*self).impl();
                               py::gil_scoped_release released;
                               return impl.units ? impl.units->gathered_bytes() : int64_t{0};
                             })
      .def_property_readonly("closed", [](Self& self) { return self.ended(); })
      .def("close", [](Self& self) { self.end(); });
  bind_save(module, engine);
  bind_flat(module, engine);
  module.def("no_sync", [](const py::object& engine) { return std::make_unique<NoSyncObject>(engine); }, "engine"_a);
  module.def("one_pass", [](const py::object& engine) { return std::make_unique<PassObject>(engine); }, "engine"_a);
  module.def(
      "gathered",
      [](const py::object& engine, std::vector<at::Tensor> parameters, bool write) {
        return std::make_unique<GatheredObject>(engine, std::move(parameters), write ? Access::write : Access::read);
      },
      "engine"_a, "parameters"_a, "write"_a);
}

}  // namespace plumb::python

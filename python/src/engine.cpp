// Binds plumb/engine.h.
#include "plumb/engine.h"

#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include "bind.h"
#include "engine/impl.h"
#include "unit/units.h"

namespace plumb::python {
namespace {

using namespace py::literals;
using DoorPtr = std::shared_ptr<unit::Door>;

using EngineObject = Owned<Engine>;

using Units = std::vector<std::pair<DoorPtr, std::vector<at::Tensor>>>;

std::unique_ptr<EngineObject> build(WorldObject& world, NamedTensors parameters, NamedTensors buffers,
                                    const Units& units, const Optimizer& optimizer, const Options& options) {
  World place = *world;
  py::gil_scoped_release released;
  std::vector<UnitSpec> specs;
  for (const auto& [door, own] : units) specs.push_back({door, own});
  return std::make_unique<EngineObject>(std::make_unique<Engine>(std::make_unique<Engine::Impl>(
      std::move(place), std::move(parameters), std::move(buffers), std::move(specs), optimizer, options)));
}

std::optional<at::Tensor> or_none(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
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
  void exit() {
    py::gil_scoped_release released;
    scope_.reset();
  }

 private:
  py::object engine_;
  std::unique_ptr<NoSync> scope_;
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
  void exit(const py::object& failure) {
    const bool failed = !failure.is_none();
    py::gil_scoped_release released;
    if (!failed) {
      delete scope_.release();  // which may throw
      return;
    }
    // A scope learns from C++ that it ends by an exception, and then publishes nothing.
    struct Unwinding {};
    try {
      const auto ends = std::move(scope_);
      throw Unwinding{};
    } catch (const Unwinding&) {
    }
  }

 private:
  py::object engine_;
  std::vector<at::Tensor> parameters_;
  Access access_;
  std::unique_ptr<Gathered> scope_;
};

void use_hook(EngineObject& self, py::object state, py::object hook) {
  std::unique_ptr<c10d::CommHookInterface> asked =
      std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
  Reducer& reducer = *(*self).impl().reducer;
  py::gil_scoped_release released;
  reducer.use_hook(std::move(asked));
}

void bind_options(py::module_& module) {
  py::class_<LossScale>(module, "LossScale")
      .def(py::init([](double initial, double growth, double backoff, int64_t interval) {
             return LossScale{initial, growth, backoff, interval};
           }),
           "initial"_a = LossScale{}.initial, py::kw_only(), "growth"_a = LossScale{}.growth,
           "backoff"_a = LossScale{}.backoff, "interval"_a = LossScale{}.interval)
      .def_readonly("initial", &LossScale::initial)
      .def_readonly("growth", &LossScale::growth)
      .def_readonly("backoff", &LossScale::backoff)
      .def_readonly("interval", &LossScale::interval);
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
      .def_readwrite("schedule", &Options::schedule)
      .def_readwrite("groups", &Options::groups)
      .def_readwrite("hold_unsharded", &Options::hold_unsharded)
      .def_readwrite("deterministic", &Options::deterministic)
      .def_readwrite("virtual_ranks", &Options::virtual_ranks)
      .def_readwrite("ledger", &Options::ledger);
  py::class_<StepInfo>(module, "StepInfo")
      .def_readonly("step", &StepInfo::step)
      .def_readonly("lr", &StepInfo::lr)
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
  const auto done = [](auto& self, const py::object&, const py::object&, const py::object&) { self.exit(); };
  py::class_<NoSyncObject>(module, "NoSync")
      .def("__enter__", [](NoSyncObject& self) { self.enter(); })
      .def("__exit__", [done](NoSyncObject& self, const py::object& a, const py::object& b, const py::object& c) {
        done(self, a, b, c);
      });
  py::class_<GatheredObject>(module, "Gathered")
      .def("__enter__", [](GatheredObject& self) { self.enter(); })
      .def("__exit__",
           [](GatheredObject& self, const py::object& type, const py::object&, const py::object&) { self.exit(type); });
  using Self = EngineObject;
  py::class_<Self>(module, "Engine")
      .def(py::init(&build), "world"_a, "parameters"_a, "buffers"_a, "units"_a, "optimizer"_a, "options"_a)
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
      .def(
          "step", [](Self& self) { return (*self).step(); }, no_gil())
      .def(
          "compare_settings", [](Self& self, Settings settings) { (*self).impl().user_settings = std::move(settings); },
          py::arg("settings"))
      .def(
          "begin_step", [](Self& self) { return (*self).begin_step(); }, no_gil())
      .def(
          "pieces", [](Self& self) { return (*self).pieces(); }, no_gil())
      .def(
          "end_step", [](Self& self) { (*self).end_step(); }, no_gil())
      .def(
          "zero_grad", [](Self& self) { (*self).zero_grad(); }, no_gil())
      .def(
          "set_lr", [](Self& self, double lr) { (*self).set_lr(lr); }, "lr"_a, no_gil())
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
          "set_absent", [](Self& self, bool absent) { (*self).impl().reducer->set_absent(absent); }, "absent"_a,
          no_gil())
      .def("use_hook", &use_hook, "state"_a, "hook"_a)
      .def(
          "divide_by", [](Self& self, int ranks) { (*self).impl().reducer->divide_by(ranks); }, "ranks"_a, no_gil())
      .def_property_readonly("gathered_bytes",
                             [](Self& self) {
                               auto& impl = (*self).impl();
                               py::gil_scoped_release released;
                               return impl.units ? impl.units->gathered_bytes() : int64_t{0};
                             })
      .def_property_readonly("closed", [](Self& self) { return self.ended(); })
      .def("close", [](Self& self) { self.end(); });
  module.def("no_sync", [](const py::object& engine) { return std::make_unique<NoSyncObject>(engine); }, "engine"_a);
  module.def(
      "gathered",
      [](const py::object& engine, std::vector<at::Tensor> parameters, bool write) {
        return std::make_unique<GatheredObject>(engine, std::move(parameters), write ? Access::write : Access::read);
      },
      "engine"_a, "parameters"_a, "write"_a);
}

}  // namespace plumb::python

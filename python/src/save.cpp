// Binds plumb/save.h, with what Python's own optimizers need beside it.
#include "plumb/save.h"

#include "bind.h"
#include "engine/impl.h"
#include "engine/loading.h"
#include "engine/refill.h"
#include "engine/saving.h"
#include "engine/weights.h"
#include "grad/mode.h"

namespace plumb::python {
namespace {

using namespace py::literals;

// What an extra's object says on either way; an exception of Python's becomes an Error here, where the GIL is held.
Extra extra_of(const std::string& name, const py::object& save, const py::object& load) {
  const auto call = [](const py::object& function, const auto&... arguments) {
    try {
      return function(arguments...);
    } catch (py::error_already_set& error) {
      throw Error(error.what());
    }
  };
  // Python's references are let go of with the GIL, wherever the last one goes.
  struct Held {
    py::object save, load;
    ~Held() {
      py::gil_scoped_acquire gil;
      save = py::object();
      load = py::object();
    }
  };
  auto held = std::make_shared<Held>(Held{save, load});
  return {name,
          [held, call] {
            py::gil_scoped_acquire gil;
            return py::cast<NamedTensors>(call(held->save));
          },
          [held, call](const NamedTensors& tensors) {
            py::gil_scoped_acquire gil;
            call(held->load, py::cast(tensors));
          }};
}

using ExtraWords = std::vector<std::tuple<std::string, py::object, py::object>>;

std::vector<Extra> extras_of(const ExtraWords& words) {
  std::vector<Extra> extras;
  for (const auto& [name, save, load] : words) extras.push_back(extra_of(name, save, load));
  return extras;
}

std::string save(EngineObject& self, const std::string& folder, int64_t samples, int64_t keep, bool background,
                 const ExtraWords& extras, const std::optional<Outer>& outer, const std::vector<std::string>& leave_out,
                 const NamedTensors& generators, const std::string& refusal, bool within_step) {
  Engine& engine = *self;
  const SaveOptions options{samples, keep, extras_of(extras), leave_out};
  py::gil_scoped_release released;
  auto& saving = engine.impl().saving;
  if (!saving) saving = std::make_shared<Saving>(engine.impl());
  saving->begin(folder, options, outer ? &*outer : nullptr, background ? Copy::yes : Copy::no, generators, refusal,
                within_step ? When::between_backwards : When::between_steps);
  return background ? "" : saving->finish();
}

// Where this rank keeps what a checkpoint holds of an engine: kind, name, key, owner, memory (None: the owner has gaps),
// begin, end, and whether other ranks have other elements.
using SlotWords = std::tuple<std::string, std::string, std::string, at::Tensor, at::Tensor, int64_t, int64_t, bool>;

std::vector<SlotWords> words_of(const std::vector<SavedSlot>& slots) {
  std::vector<SlotWords> all;
  for (const SavedSlot& slot : slots) {
    all.emplace_back(save::to_string(slot.kind), slot.name, slot.key, slot.owner, slot.memory, slot.begin, slot.end,
                     slot.sharded);
  }
  return all;
}

std::vector<SlotWords> slots(EngineObject& self) {
  Engine::Impl& impl = (*self).impl();
  if (impl.units) impl.units->begin_update();
  const std::vector<SavedSlot> found = slots_of(impl, updates_of(impl));
  if (impl.units) impl.units->end_update();
  return words_of(found);
}

}  // namespace

void bind_save(py::module_& module, py::class_<EngineObject>& engine) {
  py::class_<OuterTensor> outer(module, "OuterTensor");
  py::enum_<OuterTensor::Place>(outer, "Place")
      .value("piece", OuterTensor::Place::piece)
      .value("whole", OuterTensor::Place::whole)
      .value("other", OuterTensor::Place::other);
  outer
      .def(py::init(
               [](OuterTensor::Place place, std::string parameter, std::string key, at::Tensor value, int64_t begin) {
                 return OuterTensor{place, std::move(parameter), std::move(key), std::move(value), begin};
               }),
           "place"_a, "parameter"_a, "key"_a, "value"_a, "begin"_a = 0)
      .def_readonly("place", &OuterTensor::place)
      .def_readonly("parameter", &OuterTensor::parameter)
      .def_readonly("key", &OuterTensor::key)
      .def_readonly("value", &OuterTensor::value)
      .def_readonly("begin", &OuterTensor::begin);
  py::class_<Outer>(module, "Outer")
      .def(py::init([](std::vector<OuterTensor> tensors, std::string text) {
             return Outer{std::move(tensors), std::move(text)};
           }),
           "tensors"_a, "text"_a)
      .def_readonly("tensors", &Outer::tensors)
      .def_readonly("text", &Outer::text);
  py::class_<Mismatch>(module, "Mismatch")
      .def_property_readonly("kind",
                             [](const Mismatch& one) {
                               constexpr const char* names[] = {"missing", "extra", "reshaped"};
                               return names[static_cast<int>(one.kind)];
                             })
      .def_readonly("what", &Mismatch::what)
      .def_readonly("saved", &Mismatch::saved)
      .def_readonly("live", &Mismatch::live);
  py::class_<LoadInfo>(module, "LoadInfo")
      .def_readonly("path", &LoadInfo::path)
      .def_readonly("step", &LoadInfo::step)
      .def_readonly("samples", &LoadInfo::samples)
      .def_readonly("mismatches", &LoadInfo::mismatches)
      .def("table", &LoadInfo::table)
      .def("__repr__", [](const LoadInfo& info) {
        return c10::str("LoadInfo(path='", info.path, "', step=", info.step, ", samples=", info.samples,
                        ", mismatches=", info.mismatches.size(), ")");
      });
  py::class_<Loading>(module, "Loading")
      .def_property_readonly("info", [](const Loading& self) { return self.info(); })
      .def_property_readonly("outer", [](const Loading& self) { return self.outer(); })
      .def_property_readonly("generators",
                             [](const Loading& self) {
                               std::vector<std::tuple<std::string, at::Tensor, uint64_t>> all;
                               for (const auto& one : self.outer_generators())
                                 all.emplace_back(one.name, one.state, one.seed);
                               return all;
                             })
      .def("accept", &Loading::accept, "refusal"_a, no_gil())
      .def("apply", &Loading::apply, no_gil());
  engine
      .def("save", &save, "folder"_a, "samples"_a, "keep"_a, "background"_a, "extras"_a, "outer"_a, "leave_out"_a,
           "generators"_a, "refusal"_a, "within_step"_a)
      .def(
          "finish_save", [](EngineObject& self) { return (*self).finish_save(); }, no_gil())
      .def(
          "begin_load",
          [](EngineObject& self, const std::string& path, bool strict, const ExtraWords& extras, bool outer,
             const std::string& refusal) {
            Engine& engine = *self;
            const LoadOptions options{strict, extras_of(extras)};
            py::gil_scoped_release released;
            engine.finish_save();
            return std::make_unique<Loading>(engine.impl(), path, options, outer ? OuterState::taken : OuterState::none,
                                             refusal);
          },
          "path"_a, "strict"_a, "extras"_a, "outer"_a, "refusal"_a, py::keep_alive<0, 1>())
      .def(
          "load_weights",
          [](EngineObject& self, const std::string& path, bool strict, const std::set<std::string>& passing,
             const std::string& refusal) {
            const TrainingMode training;
            (*self).finish_save();
            return load_weights((*self).impl(), path, {strict, {}}, passing, refusal);
          },
          "path"_a, "strict"_a, "passing"_a, "refusal"_a, no_gil())
      .def("slots", &slots, no_gil())
      .def(
          "all_slots", [](EngineObject& self) { return words_of(all_slots((*self).impl())); }, no_gil())
      .def(
          "words", [](EngineObject& self) { return save::Json(words_of((*self).impl())).write(); }, no_gil())
      .def(
          "check_words",
          [](EngineObject& self, const std::string& words) {
            check_words((*self).impl(), save::Json::parse(words, "a checkpoint's words"));
          },
          "words"_a, no_gil())
      .def(
          "refill",
          [](EngineObject& self, const std::vector<at::Tensor>& values, const std::string& words) {
            refill((*self).impl(), values, save::Json::parse(words, "a checkpoint's words"));
          },
          "values"_a, "words"_a, no_gil())
      .def(
          "exchange",
          [](EngineObject& self, const std::string& text, const std::string& call) {
            Engine::Impl& impl = (*self).impl();
            return share_outcome(impl.world, {text, ""}, impl.reducer->here(Where::Kind::step, call));
          },
          "text"_a, "call"_a, no_gil())
      .def_property_readonly("steps", [](EngineObject& self) { return (*self).steps(); });
}

}  // namespace plumb::python

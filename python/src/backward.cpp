// Python as the host of backwards (see grad/backward.h): the object that runs them for torch is replaced by one of a type
// derived from its own, which announces each; and tensors are saved through torch's own stack of Python hooks.
#include "grad/backward.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "bind.h"
#include "engine/outputs.h"

namespace plumb::python {
namespace {

using torch::autograd::Engine;
using torch::autograd::PyNode;
using torch::autograd::SavedVariableHooks;

// ---- announcing

PyObject* inner_run = nullptr;  // run_backward of the object that was there before

// In words, without the traceback: that would keep the tensors of every frame alive.
std::exception_ptr failure_of(const py::error_scope& error) {
  std::string text = "a backward failed";
  if (error.value != nullptr) {
    try {
      text += ": " + std::string(py::str(py::handle(error.value)));
    } catch (const py::error_already_set&) {  // an exception that cannot be printed
    }
  }
  return std::make_exception_ptr(std::runtime_error(text));
}

// See around_backwards(); never destroyed, since backwards may run while the interpreter ends.
struct Around {
  py::object begin, end;
};
Around& around() {
  static auto* instance = new Around;
  return *instance;
}

// What `end` raises reaches the user, unless the backward raised already.
bool tell_end(bool good) {
  if (!around().end) return true;
  const auto call = [&] {
    return static_cast<bool>(
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(around().end.ptr(), good ? Py_True : Py_False)));
  };
  if (good) return call();
  const py::error_scope error;  // the user's; it is set again when it goes
  if (!call()) PyErr_Clear();
  return false;
}

constexpr Py_ssize_t inputs_argument = 4;  // of run_backward: what gradients are asked of

// A parameter that is shown as its shard has a gradient where its whole stand-in is used: null if there is none of those.
py::object inputs_as_used(PyObject* inputs) {
  if (PyTuple_Check(inputs) == 0) return {};
  py::object used;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    const py::handle one = PyTuple_GET_ITEM(inputs, i);
    if (!py::hasattr(one, "_plumb_leaf")) continue;
    if (!used) used = py::list(py::reinterpret_borrow<py::tuple>(inputs));
    used[py::int_(i)] = one.attr("_plumb_leaf");
  }
  return used ? py::object(py::tuple(used)) : py::object();
}

PyObject* announce(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  std::vector<PyObject*> mapped;
  py::object inputs;
  if (count > inputs_argument) inputs = inputs_as_used(args[inputs_argument]);
  if (inputs) {
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    mapped.assign(args, args + count + named);
    mapped[inputs_argument] = inputs.ptr();
    args = mapped.data();
  }
  backward::Outermost outermost;
  const bool tells = !outermost.nested() && around().begin;
  if (tells && !py::reinterpret_steal<py::object>(PyObject_CallNoArgs(around().begin.ptr()))) return nullptr;
  py::object result =
      py::reinterpret_steal<py::object>(PyObject_Vectorcall(inner_run, args, static_cast<size_t>(count), names));
  if (outermost.nested()) return result.release().ptr();
  std::exception_ptr thrown;
  if (!result) {
    adopt_error();
    const py::error_scope error;  // the user's; it is set again when it goes
    const std::exception_ptr failure = failure_of(error);
    py::gil_scoped_release released;  // listeners wait for other ranks
    (void)outermost.end(failure);
  } else {
    py::gil_scoped_release released;
    thrown = outermost.end(nullptr);
  }
  if (thrown) set_error(thrown);
  if (tells && !tell_end(result && !thrown)) return nullptr;
  return thrown ? nullptr : result.release().ptr();
}

PyObject* run_backward(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) noexcept {
  try {
    return announce(args, count, names);
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

PyMethodDef engine_methods[] = {{"run_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&run_backward)),
                                 METH_FASTCALL | METH_KEYWORDS, "torch's own, announced to plumb"},
                                {nullptr, nullptr, 0, nullptr}};

// ---- saving

// Hooks that were in force before ours: checkpointing's, offloading's, anybody's.
class PythonHooks final : public SavedVariableHooks {
 public:
  PythonHooks(py::object pack, py::object unpack) : pack_(std::move(pack)), unpack_(std::move(unpack)) {}
  ~PythonHooks() override {
    if (Py_IsInitialized() == 0) {
      for (py::object* object : {&pack_, &unpack_, &packed_}) object->release();
      return;
    }
    py::gil_scoped_acquire gil;
    for (py::object* object : {&pack_, &unpack_, &packed_}) *object = py::object();
  }
  PythonHooks(const PythonHooks&) = delete;
  PythonHooks& operator=(const PythonHooks&) = delete;

  void call_pack_hook(const at::Tensor& tensor) override {
    py::gil_scoped_acquire gil;
    packed_ = pack_(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    pack_ = py::object();
  }
  at::Tensor call_unpack_hook() override {
    py::gil_scoped_acquire gil;
    const py::object value = unpack_(packed_);
    if (!THPVariable_Check(value.ptr())) {
      throw py::type_error("a saved-tensor hook must unpack a Tensor, not a " +
                           std::string(py::str(py::type::of(value).attr("__name__"))));
    }
    return THPVariable_Unpack(value.ptr());
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    throw Error("compiled autograd cannot take over what a unit saved; compile the units, or train without it");
  }

 private:
  py::object pack_, unpack_, packed_;
};

constexpr const char* packed_name = "plumb.saved";

// What torch calls with a tensor to save; `below` is the pair of hooks that was in force before, or null.
PyObject* pack(PyObject* below, PyObject* tensor) noexcept {
  try {
    backward::Hooks inner;
    if (below != nullptr) {
      inner = std::make_unique<PythonHooks>(py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(below, 0)),
                                            py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(below, 1)));
    }
    backward::Hooks hooks = backward::hooks_for_save(std::move(inner));
    if (!hooks) return Py_NewRef(tensor);
    hooks->call_pack_hook(THPVariable_Unpack(tensor));
    return PyCapsule_New(hooks.release(), packed_name, [](PyObject* capsule) {
      delete static_cast<SavedVariableHooks*>(PyCapsule_GetPointer(capsule, packed_name));
    });
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

PyObject* unpack(PyObject*, PyObject* packed) noexcept {
  if (!PyCapsule_IsValid(packed, packed_name)) return Py_NewRef(packed);
  try {
    at::Tensor value;
    {
      py::gil_scoped_release released;  // a gather waits for other ranks
      value = static_cast<SavedVariableHooks*>(PyCapsule_GetPointer(packed, packed_name))->call_unpack_hook();
    }
    return THPVariable_Wrap(value);
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

PyMethodDef pack_method = {"plumb_pack", &pack, METH_O, nullptr};
PyMethodDef unpack_method = {"plumb_unpack", &unpack, METH_O, nullptr};

bool is_ours(const py::handle& hook) {
  return PyCFunction_Check(hook.ptr()) != 0 && PyCFunction_GetFunction(hook.ptr()) == &pack;
}

thread_local std::vector<bool> pushed;  // by begin_saving(): whether hooks may be pushed there at all

class PythonHost final : public backward::Host {
 public:
  void install() override {
    py::gil_scoped_acquire gil;
    const py::object variable = py::module_::import("torch.autograd").attr("Variable");
    const py::object before = variable.attr("_execution_engine");
    inner_run = py::object(before.attr("run_backward")).release().ptr();
    static PyType_Slot slots[] = {{Py_tp_methods, engine_methods}, {0, nullptr}};
    static PyType_Spec spec = {"plumb._AnnouncingEngine", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    const py::object bases = py::make_tuple(py::type::of(before));
    const auto type = py::reinterpret_steal<py::object>(PyType_FromSpecWithBases(&spec, bases.ptr()));
    if (!type) throw py::error_already_set();
    variable.attr("_execution_engine") = type();
  }

  void begin_saving() override {
    py::gil_scoped_acquire gil;
    pushed.push_back(at::SavedTensorDefaultHooks::is_enabled());
    if (!pushed.back()) return;
    py::object below;
    if (const auto top = at::SavedTensorDefaultHooks::get_hooks(true)) {
      const auto packs = py::reinterpret_borrow<py::object>(top->first.ptr(getPyInterpreter()));
      if (is_ours(packs)) {
        below = py::reinterpret_borrow<py::object>(PyCFunction_GetSelf(packs.ptr()));
      } else {
        below = py::make_tuple(packs, py::reinterpret_borrow<py::object>(top->second.ptr(getPyInterpreter())));
      }
    }
    static PyObject* unpacks = PyCFunction_New(&unpack_method, nullptr);
    PyObject* packs = PyCFunction_New(&pack_method, below ? below.ptr() : nullptr);
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(c10::SafePyObject(packs, getPyInterpreter()),
                                            c10::SafePyObject(Py_NewRef(unpacks), getPyInterpreter()));
  }

  void end_saving() noexcept override {
    py::gil_scoped_acquire gil;
    const bool was_pushed = pushed.back();
    pushed.pop_back();
    if (was_pushed) at::SavedTensorDefaultHooks::pop_hooks();
  }
};

// The function's object: a field up to torch 2.12, asked for from 2.13.
PyObject* object_of(const auto& node) {
  if constexpr (requires { node.obj; }) {
    return node.obj;
  } else {
    return node.pyobj();
  }
}

// A node of a function that was written in Python: its outputs are those of the arguments that were tensors.
int64_t output_for(const torch::autograd::Node& node, int64_t argument) {
  // torch keeps the type's own description to itself.
  if (std::string_view(typeid(node).name()) != "N5torch8autograd6PyNodeE") return argument;
  const auto* function = reinterpret_cast<const THPFunction*>(object_of(static_cast<const PyNode&>(node)));
  const std::vector<bool>& tensors = function->is_variable_input;
  if (argument >= static_cast<int64_t>(tensors.size()) || !tensors[static_cast<size_t>(argument)]) return -1;
  return std::count(tensors.begin(), tensors.begin() + argument, true);
}

// Where the module was loaded, and not a process that was forked since.
const pid_t home = getpid();

// torch starts an engine's threads, and its pool for backwards that are nested deeply, once per process family: the engine that
// a forked process makes anew has none if there was a backward before the fork, and crashes when it needs one.
struct Opened : Engine {
  static bool has_pool(Engine& engine) { return static_cast<bool>(engine.*(&Opened::thread_pool_shared_)); }
  static void start(Engine& engine) { (engine.*(&Opened::start_device_threads))(); }
};

}  // namespace

void around_backwards(py::object begin, py::object end) { around() = {std::move(begin), std::move(end)}; }

void settle_autograd() {
  Engine& engine = Engine::get_default_engine();
  if (getpid() == home || Opened::has_pool(engine)) return;
  try {
    engine.initialize_device_threads_pool();
  } catch (const c10::Error&) {  // torch cannot run backwards here, and says so to whoever tries
    return;
  }
  if (!Opened::has_pool(engine)) Opened::start(engine);
}

void announce_backwards() {
  static PythonHost host;
  backward::use_host(host);
  find_outputs_with(&output_for);
}

}  // namespace plumb::python

// What the files of the binding share. Each binds one header of include/plumb.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <unistd.h>

#include <exception>
#include <memory>

#include "plumb/engine.h"
#include "plumb/world.h"

namespace plumb::python {

namespace py = pybind11;

// Every call that can take a lock of ours or wait for a rank gives the GIL away first: hooks that hold such a lock drop
// tensors that Python knows, and take the GIL for it.
using no_gil = py::call_guard<py::gil_scoped_release>;

void bind_error(py::module_& module);
void bind_world(py::module_& module);
void bind_strategy(py::module_& module);
void bind_optim(py::module_& module);
void bind_unit(py::module_& module);
void bind_engine(py::module_& module);
void bind_nn(py::module_& module);
void bind_shards(py::module_& module);
void bind_saved(py::module_& module);

// Python announces its backwards from now on, and saves tensors through our hooks where a unit asks for it.
void announce_backwards();

// In a forked process torch makes its autograd engine anew at the first use, and threads whose first uses meet would all do
// it, each under the others' feet; nor would it have what nested backwards need. Called before there are several.
void settle_autograd();

// `begin()` is called before every outermost backward of Python's, and `end(good)` after it, when the engines have settled.
void around_backwards(py::object begin, py::object end);

// Sets the Python error that a C++ exception stands for. Needs the GIL.
void set_error(const std::exception_ptr& thrown) noexcept;

// An Error of ours that went through autograd came out as torch's RuntimeError: makes it plumb.Error again. Needs the GIL.
void adopt_error() noexcept;

// Something of this process: a world, an engine. It ends without the GIL, since its end may wait for threads that need it;
// and not at all in a forked process, whose parent goes on with the same connections.
template <class T>
class Owned {
 public:
  explicit Owned(std::unique_ptr<T> value) : value_(std::move(value)) {}
  ~Owned() { end(); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  void end() {
    if (getpid() != home_) {
      (void)value_.release();
    } else {
      py::gil_scoped_release released;
      value_.reset();
    }
  }
  bool ended() const { return !value_; }
  T& operator*() const {
    if (!value_) throw Error("this engine or world was closed; build a new one");
    return *value_;
  }

 private:
  std::unique_ptr<T> value_;
  const pid_t home_ = getpid();
};

using WorldObject = Owned<World>;
using EngineObject = Owned<Engine>;

void bind_save(py::module_& module, py::class_<EngineObject>& engine);

}  // namespace plumb::python

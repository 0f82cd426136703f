// plumb.Error, and how exceptions of C++ become Python's.
#include "bind.h"

#include <torch/csrc/Exceptions.h>

#include <string>
#include <string_view>
#include <utility>

#include "plumb/error.h"
#include "plumb/save.h"

namespace plumb::python {
namespace {

PyObject* error_type = nullptr;
PyObject* save_error_type = nullptr;

// Messages speak C++, whose words have others here.
constexpr std::pair<std::string_view, std::string_view> kWords[] = {
    {"Access::write", "write=True"}, {"gathered({...}", "gathered([...]"},
    {"gathered({", "gathered(["},    {"}, write=True", "], write=True"},
    {"plumb::Unit", "unit"},         {"Options::", ""},
    {"p.grad()", "p.grad"},
};

std::string in_python(std::string text) {
  for (const auto& [theirs, ours] : kWords) {
    for (size_t at = text.find(theirs); at != std::string::npos; at = text.find(theirs, at + ours.size())) {
      text.replace(at, theirs.size(), ours);
    }
  }
  return text;
}

void set(PyObject* type, const char* what) { PyErr_SetString(type, in_python(what).c_str()); }

// What it does not know goes on, to pybind11's own translators.
void translate(std::exception_ptr thrown) {
  if (!thrown) return;
  try {
    std::rethrow_exception(thrown);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const SaveError& error) {
    set(save_error_type, error.what());
  } catch (const Error& error) {
    set(error_type, error.what());
  } catch (const c10::IndexError& error) {
    set(PyExc_IndexError, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    set(PyExc_ValueError, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    set(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    set(PyExc_NotImplementedError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    set(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

void set_error(const std::exception_ptr& thrown) noexcept {
  try {
    translate(thrown);
  } catch (const std::exception& error) {
    set(PyExc_RuntimeError, error.what());
  } catch (...) {
    set(PyExc_RuntimeError, "plumb: an exception of an unknown kind");
  }
}

void adopt_error() noexcept {
  constexpr std::string_view ours = "plumb: ";
  if (PyErr_Occurred() != PyExc_RuntimeError) return;
  std::string said;
  {
    const py::error_scope raised;
    try {
      said = py::str(py::handle(raised.value));
    } catch (const py::error_already_set&) {  // an exception that cannot be printed is none of ours
    }
  }
  if (said.starts_with(ours)) set(error_type, said.c_str());
}

void bind_error(py::module_& module) {
  error_type = PyErr_NewExceptionWithDoc("plumb.Error",
                                         "What was found, what was expected, what to do; with the rank and the "
                                         "parameter's name.",
                                         PyExc_RuntimeError, nullptr);
  module.attr("Error") = py::reinterpret_borrow<py::object>(error_type);
  save_error_type =
      PyErr_NewExceptionWithDoc("plumb.SaveError",
                                "A checkpoint could not be written; the engine and earlier checkpoints are "
                                "as they were.",
                                error_type, nullptr);
  module.attr("SaveError") = py::reinterpret_borrow<py::object>(save_error_type);
  py::register_local_exception_translator(&translate);
}

}  // namespace plumb::python

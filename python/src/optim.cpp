// Binds plumb/optim.h.
#include "plumb/optim.h"

#include "bind.h"

namespace plumb::python {

void bind_optim(py::module_& module) {
  using namespace py::literals;
  py::class_<AdamW>(module, "AdamW")
      .def(py::init([](double lr, std::pair<double, double> betas, double eps, double weight_decay) {
             return AdamW{lr, betas.first, betas.second, eps, weight_decay};
           }),
           "lr"_a = AdamW{}.lr, py::kw_only(), "betas"_a = std::pair(AdamW{}.beta1, AdamW{}.beta2),
           "eps"_a = AdamW{}.eps, "weight_decay"_a = AdamW{}.weight_decay)
      .def_readonly("lr", &AdamW::lr)
      .def_property_readonly("betas", [](const AdamW& adam) { return std::pair(adam.beta1, adam.beta2); })
      .def_readonly("eps", &AdamW::eps)
      .def_readonly("weight_decay", &AdamW::weight_decay);
  py::class_<SGD>(module, "SGD")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay, bool nesterov) {
             return SGD{lr, momentum, dampening, weight_decay, nesterov};
           }),
           "lr"_a = SGD{}.lr, py::kw_only(), "momentum"_a = SGD{}.momentum, "dampening"_a = SGD{}.dampening,
           "weight_decay"_a = SGD{}.weight_decay, "nesterov"_a = SGD{}.nesterov)
      .def_readonly("lr", &SGD::lr)
      .def_readonly("momentum", &SGD::momentum)
      .def_readonly("dampening", &SGD::dampening)
      .def_readonly("weight_decay", &SGD::weight_decay)
      .def_readonly("nesterov", &SGD::nesterov);
  py::class_<NoOptimizer>(module, "NoOptimizer").def(py::init<>());
  py::class_<UserOptimizer>(module, "UserOptimizer").def(py::init<>());
  // By names, decided once: a function of Python's would be called for every parameter of every step.
  py::class_<ParameterGroup>(module, "ParameterGroup")
      .def(py::init([](std::set<std::string> names, std::optional<double> lr, std::optional<double> weight_decay) {
             auto match = [names = std::move(names)](const std::string& name) { return names.contains(name); };
             return ParameterGroup{std::move(match), lr, weight_decay};
           }),
           "names"_a, py::kw_only(), "lr"_a = py::none(), "weight_decay"_a = py::none());
  py::class_<Schedule>(module, "Schedule")
      .def(py::init([](int64_t warmup, int64_t total, double floor) { return Schedule{warmup, total, floor}; }),
           py::kw_only(), "warmup"_a = Schedule{}.warmup, "total"_a = Schedule{}.total, "floor"_a = Schedule{}.floor)
      .def_readonly("warmup", &Schedule::warmup)
      .def_readonly("total", &Schedule::total)
      .def_readonly("floor", &Schedule::floor)
      .def("factor", &Schedule::factor, "step"_a);
}

}  // namespace plumb::python

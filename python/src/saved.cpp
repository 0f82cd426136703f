// Binds save/checkpoint.h and save/new_checkpoint.h: checkpoints without an engine, for what reads and writes other formats.
#include "save/checkpoint.h"

#include "bind.h"
#include "engine/slots.h"
#include "save/new_checkpoint.h"

namespace plumb::python {
namespace {

using namespace py::literals;

save::Kind kind_of(const std::string& word) {
  using save::Kind;
  for (const Kind kind :
       {Kind::weight, Kind::optimizer, Kind::optimizer_value, Kind::buffer, Kind::generator, Kind::extra}) {
    if (save::to_string(kind) == word) return kind;
  }
  throw Error("a tensor of a checkpoint is no '" + word + "'");
}

save::SavedTensor tensor_of(const std::string& kind, std::string name, std::string key, at::ScalarType dtype,
                            std::vector<int64_t> shape) {
  save::SavedTensor tensor;
  tensor.kind = kind_of(kind);
  tensor.name = std::move(name);
  tensor.key = std::move(key);
  tensor.dtype = dtype_name(dtype, tensor.title());
  tensor.shape = std::move(shape);
  return tensor;
}

std::unique_ptr<save::Checkpoint> opened(const std::string& path) {
  return std::make_unique<save::Checkpoint>(save::newest_of(path));
}

// In its shape, compared with its checksums.
at::Tensor read(const save::Checkpoint& checkpoint, const save::SavedTensor& tensor) {
  const at::Tensor flat = at::empty({tensor.numel()}, dtype_of(tensor.dtype));
  checkpoint.read(tensor, 0, tensor.numel(), flat.mutable_data_ptr());
  return tensor.strides.empty() ? flat.view(tensor.shape) : flat.as_strided(tensor.shape, tensor.strides);
}

void add_file(save::NewCheckpoint& self, const std::string& name, const std::vector<save::SavedTensor>& tensors,
              const py::function& read) {
  std::vector<save::Share> shares;
  for (const save::SavedTensor& tensor : tensors) shares.push_back({tensor, 0, tensor.numel()});
  self.add_file(name, shares, [&](size_t i, const save::NewCheckpoint::Write& write) {
    const auto value = read(i).cast<at::Tensor>().detach().contiguous();
    if (!value.device().is_cpu() || value.scalar_type() != dtype_of(tensors[i].dtype) ||
        value.sizes().vec() != tensors[i].shape) {
      throw Error(c10::str(tensors[i].title(), " is ", value.scalar_type(), " ", value.sizes(), " on ", value.device(),
                           "; expected ", tensors[i].dtype, " ", at::IntArrayRef(tensors[i].shape)));
    }
    write(value.const_data_ptr(), value.nbytes());
  });
}

}  // namespace

void bind_saved(py::module_& module) {
  py::class_<save::SavedTensor>(module, "SavedTensor")
      .def(py::init(&tensor_of), "kind"_a, "name"_a, "key"_a, "dtype"_a, "shape"_a)
      .def_property_readonly("kind", [](const save::SavedTensor& self) { return save::to_string(self.kind); })
      .def_readonly("name", &save::SavedTensor::name)
      .def_readonly("key", &save::SavedTensor::key)
      .def_property_readonly("dtype", [](const save::SavedTensor& self) { return dtype_of(self.dtype); })
      .def_readonly("shape", &save::SavedTensor::shape)
      .def("__repr__", &save::SavedTensor::title);
  py::class_<save::Checkpoint>(module, "SavedCheckpoint")
      .def(py::init(&opened), "path"_a, no_gil())
      .def_property_readonly("path", &save::Checkpoint::path)
      .def_property_readonly("step", [](const save::Checkpoint& self) { return self.manifest().step; })
      .def_property_readonly("samples", [](const save::Checkpoint& self) { return self.manifest().samples; })
      .def_property_readonly("ranks", [](const save::Checkpoint& self) { return self.manifest().ranks; })
      .def_property_readonly("engine",
                             [](const save::Checkpoint& self) { return save::Json(self.manifest().engine).write(); })
      .def_property_readonly(
          "provenance", [](const save::Checkpoint& self) { return save::Json(self.manifest().provenance).write(); })
      .def_property_readonly("tensors", [](const save::Checkpoint& self) { return self.manifest().tensors; })
      .def("read", &read, "tensor"_a, no_gil());
  py::class_<save::NewCheckpoint>(module, "NewCheckpoint")
      .def(py::init<std::string>(), "root"_a, no_gil())
      .def("add_file", &add_file, "name"_a, "tensors"_a, "read"_a)
      .def(
          "commit",
          [](save::NewCheckpoint& self, int64_t step, int64_t samples, int64_t ranks, const std::string& engine,
             const std::string& provenance) {
            self.manifest().step = step;
            self.manifest().samples = samples;
            self.manifest().ranks = ranks;
            self.manifest().engine = save::Json::parse(engine, "'engine'").object("'engine'");
            self.manifest().provenance = save::Json::parse(provenance, "'provenance'").object("'provenance'");
            return self.commit();
          },
          "step"_a, "samples"_a, "ranks"_a, "engine"_a, "provenance"_a, no_gil());
}

}  // namespace plumb::python

// Binds what a face needs that shows each rank's shards as the parameters (plumb.fully_shard).
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <algorithm>

#include "bind.h"
#include "grad/piece.h"
#include "lane/lane.h"
#include "unit/deferred.h"

namespace plumb::python {
namespace {

void let_go(void* memory) { delete static_cast<c10::Storage*>(memory); }

// Nobody but tensors knows where its memory is, and nothing but the rows is there.
bool may_move(const at::Tensor& rows) {
  const c10::Storage& storage = rows.storage();
  const c10::DeleterFnPtr deleter = storage.data_ptr().get_deleter();
  const c10::Allocator* allocator = c10::GetAllocator(rows.device().type());
  const bool ordinary = deleter != nullptr && allocator != nullptr && deleter == allocator->raw_deleter();
  // A tensor that became a numpy array has a storage that cannot be resized.
  return (deleter == &let_go || ordinary) && storage.resizable() && rows.storage_offset() == 0 &&
         storage.nbytes() == rows.nbytes();
}

// The rows, and whatever else lies over their storage, lie in `memory` from here on, which has the same elements in the
// same order, and is kept alive by them. False: they stay, since somebody knows their address, or there is more.
bool move_rows(const at::Tensor& rows, const at::Tensor& memory) {
  if (rows.numel() == 0 || rows.const_data_ptr() == memory.const_data_ptr()) return true;
  if (!may_move(rows) || memory.nbytes() != rows.nbytes() || memory.device() != rows.device()) return false;
  keep_for_current(rows);  // kernels may still read what is freed here
  rows.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      {memory.mutable_data_ptr(), new c10::Storage(memory.storage()), &let_go, memory.device()});
  return true;
}

}  // namespace

void bind_shards(py::module_& module) {
  using namespace py::literals;
  module.def(
      "cut",
      [](WorldObject& world, const std::vector<at::Tensor>& parameters) {
        const World place = *world;
        py::gil_scoped_release released;
        deferred::cut(place, parameters);
      },
      "world"_a, "parameters"_a);
  module.def("keep_rows", &deferred::keep_rows, "parameter"_a, "mine"_a, "rank"_a, no_gil());
  module.def("move_rows", &move_rows, "rows"_a, "memory"_a, no_gil());
  module.def("around_backwards", &around_backwards, "begin"_a, "end"_a);
  // A piece's numbers, in the same memory, without the mark.
  module.def("unmarked", [](const at::Tensor& tensor) { return unmarked(tensor); }, "tensor"_a, no_gil());
  // Moves with every change in place of any of them.
  module.def(
      "versions",
      [](const std::vector<at::Tensor>& tensors) {
        int64_t total = 0;
        for (const at::Tensor& tensor : tensors) total += static_cast<int64_t>(tensor._version());
        return total;
      },
      "tensors"_a);
  // Of each parameter: the numbers of its gradient, or of this rank's piece of it, as one row in the same memory.
  module.def(
      "flat_gradients",
      [](const std::vector<at::Tensor>& parameters) {
        std::vector<std::optional<at::Tensor>> flat;
        for (const at::Tensor& parameter : parameters) {
          const at::Tensor& gradient = parameter.grad();
          flat.push_back(gradient.defined() ? std::optional(unmarked(gradient).view({-1})) : std::nullopt);
        }
        return flat;
      },
      "parameters"_a, no_gil());
}

}  // namespace plumb::python

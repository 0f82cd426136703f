// The operators through which a compiled graph has whole parameters of sharded units.
//
// plumb::unit marks in a graph that is traced where a unit is entered. A pass over the graph (python/plumb/compiled/units.py)
// replaces it by plumb::gather, whose results are plain tensors of the graph: the compiler frees them behind their last use, and
// makes them again in the backward instead of saving them. So there is nothing to release, and nothing that could be read after it.
#include "unit/inside.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "grad/mode.h"
#include "plumb/error.h"
#include "unit/saved.h"
#include "unit/units.h"

namespace plumb {
namespace inside {
namespace {

std::atomic<int64_t> gathers{0}, bytes{0}, most_bytes{0}, ahead{0};

const c10::StorageImpl* storage_of(const at::Tensor& parameter) {
  return parameter.has_storage() ? parameter.storage().unsafeGetStorageImpl() : nullptr;
}

// A graph that was traced for a sharded model serves others of its kind, too: what is whole is copied, since the graph may use the
// memory of its results again.
std::vector<at::Tensor> gather(const std::vector<at::Tensor>& parameters, int64_t /*use*/) {
  const TrainingMode training;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole(parameters.size());
  std::vector<std::pair<std::shared_ptr<Units>, std::vector<size_t>>> by_owner;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto owner = saved::owner_of(storage_of(parameters[i]));
    if (!owner) {
      whole[i] = parameters[i].detach().clone();
      continue;
    }
    auto known = std::ranges::find(by_owner, owner, &decltype(by_owner)::value_type::first);
    if (known == by_owner.end()) known = by_owner.emplace(known, std::move(owner), std::vector<size_t>());
    known->second.push_back(i);
  }
  for (const auto& [owner, mine] : by_owner) {
    std::vector<at::Tensor> wanted;
    for (const size_t i : mine) wanted.push_back(parameters[i]);
    const std::vector<at::Tensor> got = owner->hand_out(wanted);
    for (size_t k = 0; k < mine.size(); ++k) whole[mine[k]] = got[k];
    ++gathers;
  }
  return whole;
}

std::vector<at::Tensor> gather_meta(const std::vector<at::Tensor>& parameters, int64_t) {
  std::vector<at::Tensor> whole;
  for (const at::Tensor& parameter : parameters)
    whole.push_back(at::empty_strided_symint(parameter.sym_sizes(), parameter.sym_strides(), parameter.options()));
  return whole;
}

// Runs only in graphs over which no pass of ours went.
void unit(const std::vector<at::Tensor>& parameters) {
  if (std::ranges::none_of(parameters, [](const at::Tensor& p) { return saved::owner_of(storage_of(p)) != nullptr; }))
    return;
  throw Error(
      "a compiled graph would use sharded parameters that its backend does not gather: with fullgraph=True use the "
      "backend inductor, aot_eager (where gradients are computed) or plumb_aot_eager, and no unit inside of a branch "
      "(torch.cond); or compile without fullgraph=True");
}

void unit_meta(const std::vector<at::Tensor>&) {}

// A tensor like `like` over memory that it keeps. at::from_blob() does as much, and asks more questions than the tensor costs.
at::Tensor over(const std::shared_ptr<Handed>& memory, int64_t begin, const at::Tensor& like, const at::Tensor& whole) {
  using Keeper = std::shared_ptr<Handed>;
  c10::DataPtr data(
      memory->data() + begin, new Keeper(memory), [](void* keeper) { delete static_cast<Keeper*>(keeper); },
      whole.device());
  const auto bytes = static_cast<size_t>(like.numel()) * whole.element_size();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr,
                       /*resizable=*/false);
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), whole.options().computeDispatchKey(), whole.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return result;
}

}  // namespace

Handed::Handed(c10::DataPtr memory, int64_t size, std::shared_ptr<std::atomic<int64_t>> of_engine)
    : memory_(std::move(memory)), bytes_(size), of_engine_(std::move(of_engine)) {
  *of_engine_ += bytes_;
  const int64_t now = bytes += bytes_;
  int64_t most = most_bytes;
  while (most < now && !most_bytes.compare_exchange_weak(most, now)) {
  }
}

Handed::~Handed() {
  *of_engine_ -= bytes_;
  bytes -= bytes_;
}

Counts counts() { return {gathers, bytes, most_bytes, ahead}; }

void forget_most() { most_bytes = bytes.load(); }

// A graph of a device that is captured would replay the kernels and not what the host decides.
TORCH_LIBRARY_FRAGMENT(plumb, library) {
  library.def("unit(Tensor[] parameters) -> ()", {at::Tag::cudagraph_unsafe});
  // `use`: its number in the graph. A unit that is used again is gathered again: no two calls are the same.
  library.def("gather(Tensor[] parameters, int use) -> Tensor[]", {at::Tag::cudagraph_unsafe});
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, library) {
  library.impl("unit", &unit);
  library.impl("gather", &gather);
}
TORCH_LIBRARY_IMPL(plumb, Meta, library) {
  library.impl("unit", &unit_meta);
  library.impl("gather", &gather_meta);
}

}  // namespace inside

// The memory itself, where nobody else has it; otherwise a copy.
std::vector<at::Tensor> Units::hand_out(const std::vector<at::Tensor>& parameters) {
  const Entrance entrance(*this);
  check_nothing_lost();
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (in_backward && backward::listen(shared_from_this())) ++tasks_;
  std::vector<at::Tensor> whole(parameters.size());
  for (Home* home : homes_of(parameters)) {
    if (home->ahead) ++inside::ahead;
    gathers_.fill(*home);
    const auto memory = std::make_shared<inside::Handed>(home->take_memory(), home->bytes(), handed_out_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const c10::StorageImpl* storage = parameters[i].storage().unsafeGetStorageImpl();
      const auto place = std::ranges::find(home->places, storage, [](const at::Tensor& one) {
        return static_cast<const c10::StorageImpl*>(one.storage().unsafeGetStorageImpl());
      });
      if (place == home->places.end()) continue;
      const Sink& sink = *home->bucket.sinks[static_cast<size_t>(place - home->places.begin())];
      whole[i] = inside::over(memory, sink.slot.offset * home->whole.element_size(), parameters[i], home->whole);
    }
  }
  return whole;
}

}  // namespace plumb

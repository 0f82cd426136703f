#include "unit/home.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "plumb/error.h"
#include "unit/deferred.h"
#include "unit/storage.h"

namespace plumb {
namespace {

// Memory that a message which nobody waits for any more may still write into.
void keep_for_ever(c10::DataPtr memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<c10::DataPtr>;  // never ends: messages may outlive what is static
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

Home::Home(Bucket& bucket, Reducer& reducer) : bucket(bucket), rank(reducer.world().rank()) {
  at::NoGradGuard no_grad;
  const at::Tensor& like = bucket.sinks[0]->parameter;
  const auto options = at::TensorOptions().dtype(like.scalar_type()).device(like.device());
  whole = at::zeros({bucket.numel}, options);
  const Where where{Where::Kind::setup, 0, 0, "the shards of the parameters"};
  Group::Shared shards = reducer.shard().share(bucket.held.size(), options, where);
  bucket.parameter = shards.mine;
  peers = std::move(shards.everybody);
  const at::Tensor rows = deferred::take_rows(bucket.sinks[0]->parameter);
  named = !reducer.options().ask_before_gathers && whole.is_cpu() && reducer.team().shard_control().names_gathers();
  if (peers.empty() && !named) reducer.gathers();
  for (Sink* sink : bucket.sinks) {
    const at::Tensor place = view_in(whole, sink->slot.offset, *sink);
    if (rows.defined()) {
      if (reducer.options().cut != Cut::at_rows || rows.numel() > bucket.held.size()) {
        throw Error(reducer.world().rank(), "parameter '" + sink->name + "' was cut by rows, and its engine does not");
      }
    } else if (deferred::waits(sink->parameter)) {
      place.copy_(deferred::restore(sink->name, sink->parameter, reducer.world(), reducer.data()));
    } else {
      place.copy_(sink->parameter);
    }
    keep_for_current(sink->parameter);
    places.push_back(at::empty({0}, options));
    shapes.push_back(sink->parameter.sizes().vec());
  }
  lend();
  for (size_t i = 0; i < places.size(); ++i) {
    at::Tensor parameter = bucket.sinks[i]->parameter;
    places[i].unsafeGetTensorImpl()->set_sizes_contiguous({parameter.numel()});
    parameter.set_data(view_in(places[i], 0, parameter));
    places[i].unsafeGetTensorImpl()->set_sizes_and_strides(parameter.sizes(), parameter.strides());
  }
  bucket.parameter.copy_(whole.narrow(0, bucket.held.begin, bucket.held.size()));
  if (rows.defined()) {
    bucket.parameter.narrow(0, 0, rows.numel()).copy_(rows);
    if (reducer.replicate().size() > 1) reducer.replicate().broadcast(bucket.parameter, 0).wait(where);
  }
  reducer.control().barrier().wait(where);  // nobody reads a shard that is not written yet
  lanes.end_all(whole.device());
  full = true;
  release();
}

std::vector<uint32_t> Home::versions_now() const {
  std::vector<uint32_t> all;
  all.reserve(bucket.sinks.size());
  for (const Sink* sink : bucket.sinks) all.push_back(sink->parameter._version());
  return all;
}

void Home::make_room() {
  c10::StorageImpl& storage = *whole.storage().unsafeGetStorageImpl();
  const auto size = static_cast<size_t>(bytes());
  fill_storage(storage, storage.allocator()->allocate(size), size);
  full = true;
}

void Home::lend() {
  auto* memory = static_cast<char*>(whole.mutable_data_ptr());
  for (size_t i = 0; i < places.size(); ++i) {
    const Sink& sink = *bucket.sinks[i];
    const int64_t item = whole.element_size();
    c10::DataPtr part(
        memory + sink.slot.offset * item, new c10::Storage(whole.storage()),
        [](void* whole) { delete static_cast<c10::Storage*>(whole); }, whole.device());
    fill_storage(*places[i].storage().unsafeGetStorageImpl(), std::move(part),
                 static_cast<size_t>(sink.parameter.numel() * item));
  }
  lent = true;
}

void Home::withdraw() {
  if (!std::exchange(lent, false)) return;
  const std::string begin = "plumb: rank " + std::to_string(rank) + ": parameter '";
  constexpr std::string_view end =
      "' was used while its unit is released; use it through its plumb::Unit, or inside engine.gathered({...})";
  for (size_t i = 0; i < places.size(); ++i) {
    const std::string& own = bucket.sinks[i]->name;
    std::string message;
    message.reserve(begin.size() + own.size() + end.size());
    message.append(begin).append(own).append(end);
    empty_storage(*places[i].storage().unsafeGetStorageImpl(), std::move(message));
  }
}

void Home::release() {
  if (!full) return;
  lanes.keep(whole.storage().data_ptr());  // the readers' kernels may still run
  withdraw();
  empty_storage(*whole.storage().unsafeGetStorageImpl(), "plumb: released");
  full = false;
}

void Home::abandon() {
  withdraw();
  c10::StorageImpl& storage = *whole.storage().unsafeGetStorageImpl();
  keep_for_ever(storage.set_data_ptr(storage.allocator()->allocate(0)));
  empty_storage(storage, "plumb: released");
  full = false;
}

c10::DataPtr Home::take_memory() {
  c10::StorageImpl& storage = *whole.storage().unsafeGetStorageImpl();
  if (!in_use()) {
    lanes.begin_all(whole.device());  // whoever has it now may write into it
    keep_for_current(whole);          // it was allocated under some stream, and is freed when the host is done with it
    withdraw();
    c10::DataPtr memory = storage.set_data_ptr(storage.allocator()->allocate(0));
    empty_storage(storage, "plumb: released");
    full = ahead = false;
    return memory;
  }
  lanes.begin_part(whole.device());
  at::Tensor copy = whole.clone();
  lanes.end_part(whole.device());
  c10::StorageImpl& other = *copy.storage().unsafeGetStorageImpl();
  return other.set_data_ptr(other.allocator()->allocate(0));
}

void Home::bring_home() {
  at::NoGradGuard no_grad;
  bool filled = false;  // with nothing but what came home
  for (size_t i = 0; i < bucket.sinks.size(); ++i) {
    const Sink* sink = bucket.sinks[i];
    at::Tensor parameter = sink->parameter;
    if (parameter.storage().unsafeGetStorageImpl() == places[i].storage().unsafeGetStorageImpl()) continue;
    if (parameter.scalar_type() != whole.scalar_type() || parameter.device() != whole.device() ||
        parameter.sizes() != shapes[i]) {
      throw Error(rank, c10::str("parameter '", sink->name, "' became ", parameter.scalar_type(), " ",
                                 parameter.sizes(), " on ", parameter.device(), "; it was ", whole.scalar_type(), " ",
                                 at::IntArrayRef(shapes[i]), " on ", whole.device(),
                                 " when its engine was built; build a new engine after changing a model"));
    }
    if (!full) {
      make_room();
      lend();
      filled = true;
    }
    const Range mine = overlap(sink->slot, parameter.numel(), bucket.held);
    const at::Tensor flat = at::empty({parameter.numel()}, whole.options());
    view_in(flat, 0, places[i]).copy_(parameter);
    whole.narrow(0, sink->slot.offset, parameter.numel()).copy_(flat);
    bucket.parameter.narrow(0, std::clamp<int64_t>(mine.begin - bucket.held.begin, 0, bucket.held.size()), mine.size())
        .copy_(flat.narrow(0, mine.begin - sink->slot.offset, mine.size()));
    keep_for_current(parameter);
    parameter.set_data(view_in(places[i], 0, places[i]));
    parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (filled) release();
}

}  // namespace plumb

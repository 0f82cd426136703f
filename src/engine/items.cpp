#include "engine/items.h"

#include <ATen/ATen.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <deque>
#include <map>
#include <set>

#include "engine/slots.h"
#include "save/file.h"
#include "save/tensors.h"
#include "save/xxh3.h"

namespace plumb {

using save::Kind;

namespace {

std::string file_of(Kind kind) {
  const bool state = kind == Kind::optimizer || kind == Kind::optimizer_value;
  return kind == Kind::weight ? "weights" : state ? "optimizer" : "rest";
}

std::string now() {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// Its numbers as they lie in memory, though it be the conjugate or the negative of what lies there.
at::Tensor plain(const at::Tensor& value) { return value.detach().resolve_conj().resolve_neg(); }

// One file: its header and its tensors.
void write_file(save::NewFile& file, const std::string& name, const std::vector<SavedItem>& items,
                save::Manifest& manifest) {
  std::vector<save::TensorInFile> places;
  for (const SavedItem& item : items) {
    places.push_back({item.tensor.in_file(), item.tensor.dtype,
                      item.whole() && item.tensor.strides.empty() ? item.tensor.shape
                                                                  : std::vector<int64_t>{item.end - item.begin}});
  }
  const std::string head = save::header_of(places, {{"format", "pt"}});
  file.write(head.data(), head.size());
  const auto number = static_cast<int64_t>(manifest.files.size());
  uint64_t bytes = head.size();
  for (const SavedItem& item : items) {
    save::Xxh3 checksum;
    file.write(item.memory.const_data_ptr(), item.memory.nbytes(), checksum);
    bytes += item.memory.nbytes();
    save::SavedTensor& tensor = manifest.tensors.emplace_back(item.tensor);
    tensor.parts = {{number, item.begin, item.end, checksum.value()}};
  }
  manifest.files.push_back({name, bytes, save::xxh3(head.data(), head.size())});
}

// Replicas hold the same items: each writes an equal share of their bytes.
std::vector<SavedItem> shared_out(std::vector<SavedItem> items, int64_t index, int64_t count) {
  int64_t total = 0;
  for (const SavedItem& item : items) total += static_cast<int64_t>(item.memory.nbytes());
  const auto cut = [&](int64_t i) {
    return static_cast<int64_t>(static_cast<double>(total) / static_cast<double>(count) * static_cast<double>(i));
  };
  const int64_t first = index == 0 ? 0 : cut(index), last = index + 1 == count ? total : cut(index + 1);
  std::vector<SavedItem> mine;
  int64_t at = 0;
  for (SavedItem& item : items) {
    const int64_t each = item.memory.element_size();
    const int64_t numel = item.end - item.begin;
    const int64_t begin = std::clamp<int64_t>((first - at + each - 1) / each, 0, numel);
    const int64_t end = std::clamp<int64_t>((last - at + each - 1) / each, 0, numel);
    at += numel * each;
    const bool empty = numel == 0 && item.tensor.numel() == 0 && index == 0;  // somebody says that it is there
    if (begin >= end && !empty) continue;
    item.memory = item.memory.narrow(0, begin, end - begin);
    item.end = item.begin + end;
    item.begin += begin;
    mine.push_back(std::move(item));
  }
  return mine;
}

}  // namespace

std::string optimizer_name(const Optimizer& optimizer) {
  constexpr const char* names[] = {"AdamW", "Adam", "SGD", "RMSprop", "none", "the user's"};
  return names[optimizer.index()];
}

std::vector<SavedItem> items_of(Engine::Impl& impl, const SaveOptions& options, const Outer* outer,
                                const NamedTensors& generators) {
  Reducer& reducer = *impl.reducer;
  const Mesh& mesh = reducer.team().mesh();
  const int rank = impl.world.rank(), size = impl.world.size();
  const int replica = rank / mesh.shard, part = rank % mesh.shard;
  const std::set<std::string> left_out(options.leave_out.begin(), options.leave_out.end());
  std::vector<SavedItem> sharded, replicated, own;
  const auto add = [&](Kind kind, const std::string& name, const std::string& key, const at::Tensor& like,
                       const at::Tensor& memory, int64_t begin, const std::vector<int64_t>& strides, bool cut,
                       SavedItem::ChangedBy changed_by) {
    SavedItem item;
    item.tensor = {kind,
                   name,
                   key,
                   dtype_name(memory.scalar_type(), save::to_string(kind) + " '" + name + "'"),
                   like.sizes().vec(),
                   strides,
                   cut,
                   {}};
    item.memory = memory;
    item.begin = begin;
    item.end = begin + memory.numel();
    item.changed_by = changed_by;
    // An empty part of a tensor that has elements is nobody's.
    if (cut && memory.numel() == 0 && !(like.numel() == 0 && part == 0)) return;
    (cut ? sharded : replicated).push_back(std::move(item));
  };
  for (const SavedSlot& slot : slots_of(impl, updates_of(impl))) {
    if (slot.kind == Kind::weight && left_out.contains(slot.name)) continue;
    const bool buffer = slot.kind == Kind::buffer;
    if (buffer && rank != 0) continue;  // rank 0's count, and another's may differ until the next step
    const at::Tensor memory = slot.memory.defined() ? slot.memory : plain(slot.owner).contiguous().view({-1});
    // The memory of an optimizer of ours is in nobody else's reach; a user's own may show its state to anybody.
    const auto changed_by = slot.kind != Kind::optimizer ? SavedItem::ChangedBy::anybody
                            : impl.updater->is_users()   ? SavedItem::ChangedBy::torch
                                                         : SavedItem::ChangedBy::step;
    add(slot.kind, slot.name, slot.key, slot.owner, memory, slot.begin, slot.strides(), slot.sharded, changed_by);
    if (buffer) {
      own.push_back(std::move(replicated.back()));
      replicated.pop_back();
    }
  }
  const auto add_own = [&](Kind kind, const std::string& name, const std::string& key, const at::Tensor& value) {
    if (!value.defined() || value.layout() != at::kStrided || value.is_quantized()) {
      throw Error(save::to_string(kind) + " '" + name + "'" + (key.empty() ? "" : " (" + key + ")") +
                  " is no dense tensor; a checkpoint holds those alone");
    }
    SavedItem item;
    const std::string dtype = dtype_name(value.scalar_type(), save::to_string(kind) + " '" + name + "'");
    item.tensor = {kind, name, key, dtype, value.sizes().vec(), {}, false, {}};
    item.memory = plain(value).contiguous().view({-1});
    item.end = item.memory.numel();
    own.push_back(std::move(item));
  };
  std::map<std::string, at::Tensor> parameters(impl.parameters.begin(), impl.parameters.end());
  for (const OuterTensor& one : outer != nullptr ? outer->tensors : std::vector<OuterTensor>{}) {
    if (one.place == OuterTensor::Place::other) {
      if (replica == 0) add_own(Kind::optimizer_value, one.parameter, one.key, one.value);
      continue;
    }
    SavedSlot slot;
    slot.owner = parameters.at(one.parameter);
    at::Tensor memory = plain(one.value);
    if (one.place == OuterTensor::Place::whole && memory.strides() == slot.owner.strides() &&
        memory.is_non_overlapping_and_dense()) {
      memory =
          memory.as_strided({memory.numel()}, {1}, memory.storage_offset());  // in the order of its parameter already
    } else if (one.place == OuterTensor::Place::whole) {
      memory = at::empty({slot.owner.numel()}, one.value.options());
      view_in(memory, 0, slot.owner).copy_(one.value.detach());
    }
    add(Kind::optimizer, one.parameter, one.key, slot.owner, memory.contiguous().view({-1}), one.begin, slot.strides(),
        one.place == OuterTensor::Place::piece && reducer.shards(reducer.row().state), SavedItem::ChangedBy::torch);
  }
  for (const Extra& extra : rank == 0 ? options.extras : std::vector<Extra>{}) {
    if (!extra.save) throw Error("the extra '" + extra.name + "' has no function to save with");
    for (const auto& [key, value] : extra.save()) add_own(Kind::extra, extra.name, key, value);
  }
  const std::string whose = "rank " + std::to_string(rank);
  for (at::Generator& generator : saved_generators()) {
    std::lock_guard lock(generator.mutex());
    add_own(Kind::generator, c10::DeviceTypeName(generator.device().type(), /*lower_case=*/true), whose,
            generator.get_state().clone());
  }
  for (const auto& [name, state] : generators) add_own(Kind::generator, name, whose, state);
  std::vector<SavedItem> mine = shared_out(std::move(sharded), replica, mesh.replicate);
  for (SavedItem& item : shared_out(std::move(replicated), rank, size)) mine.push_back(std::move(item));
  for (SavedItem& item : own) mine.push_back(std::move(item));
  return mine;
}

save::Manifest manifest_of(Engine::Impl& impl, const SaveOptions& options, const Outer* outer) {
  using save::Json;
  save::Manifest manifest;
  const Reducer& reducer = *impl.reducer;
  manifest.step = reducer.steps();
  manifest.samples = options.samples;
  manifest.ranks = impl.world.size();
  Json::Object updates;
  for (const auto& [name, count] : updates_of(impl)) updates.emplace_back(name, count);
  Json::Array order, group_lrs, extras;
  for (const std::string& name : reducer.order()) order.emplace_back(name);
  for (const double lr : impl.updater->rates().group_lrs()) group_lrs.emplace_back(lr);
  for (const Extra& extra : options.extras) extras.emplace_back(extra.name);
  Json scale;
  if (impl.scaler.on()) {
    scale = Json::Object{
        {"scale", impl.scaler.scale()}, {"good_steps", impl.scaler.good_steps()}, {"patience", impl.scaler.patience()}};
  }
  manifest.engine = {{"optimizer", optimizer_name(impl.updater->optimizer())},
                     {"lr", impl.updater->rates().lr()},
                     {"group_lrs", std::move(group_lrs)},
                     {"loss_scale", std::move(scale)},
                     {"deterministic", impl.options.deterministic},
                     {"virtual_ranks", impl.options.virtual_ranks},
                     {"updates", std::move(updates)},
                     {"order", std::move(order)},
                     {"extras", std::move(extras)},
                     {"outer", outer != nullptr ? Json::parse(outer->text, "the optimizer's state") : Json()}};
  const Mesh& mesh = impl.reducer->team().mesh();
  std::string names;
  for (const auto& [name, parameter] : impl.parameters) {
    names += c10::str(name, " ", parameter.scalar_type(), " ", parameter.sizes(), "\n");
  }
  manifest.provenance = {{"plumb", PLUMB_VERSION},
                         {"torch", TORCH_VERSION},
                         {"written", now()},
                         {"strategy", impl.options.strategy},
                         {"mesh", Json::Object{{"replicate", mesh.replicate}, {"shard", mesh.shard}}},
                         {"backend", impl.world.backend()},
                         {"model", save::hex(save::xxh3(names.data(), names.size()))}};
  return manifest;
}

std::string write_items(std::vector<SavedItem> items, save::Manifest manifest, const std::string& path,
                        const std::string& end) {
  std::map<std::string, std::vector<SavedItem>> files;
  for (SavedItem& item : items) files[file_of(item.tensor.kind)].push_back(std::move(item));
  items.clear();
  std::deque<save::NewFile> written;
  for (const auto& [name, members] : files) {
    write_file(written.emplace_back(path + "/" + name + end), name + end, members, manifest);
  }
  for (save::NewFile& file : written) file.flush();
  for (save::NewFile& file : written) file.finish();
  return manifest.write();
}

}  // namespace plumb

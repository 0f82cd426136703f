#include "engine/saving.h"

#include <ATen/ATen.h>
#include <torch/version.h>

#include <chrono>
#include <ctime>
#include <deque>
#include <filesystem>

#include "engine/impl.h"
#include "engine/slots.h"
#include "save/tensors.h"
#include "save/xxh3.h"
#include "watch/road.h"

namespace plumb {

using save::Kind;

// What this rank writes: some elements of one tensor.
struct Saving::Item {
  save::SavedTensor tensor;  // without parts
  at::Tensor memory;         // contiguous, of elements [begin, end)
  int64_t begin = 0, end = 0;
  enum class ChangedBy { anybody, step } changed_by = ChangedBy::anybody;
  bool whole() const { return begin == 0 && end == tensor.numel(); }
};

struct Saving::Taken {
  std::vector<Item> items;
  save::Manifest manifest;
};

namespace {

std::string file_of(Kind kind) {
  const bool state = kind == Kind::optimizer || kind == Kind::optimizer_value;
  return kind == Kind::weight ? "weights" : state ? "optimizer" : "rest";
}

std::string numbered(int number) {
  const std::string digits = std::to_string(number);
  return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
}

// The same folder wherever the process works when its files are written.
std::string absolute(const std::string& folder) {
  std::error_code ignored;
  const std::string found = folder.empty() ? folder : std::filesystem::absolute(folder, ignored).string();
  return found.empty() ? folder : found;
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
template <class Items>
void write_file(save::NewFile& file, const std::string& name, const Items& items, save::Manifest& manifest) {
  std::vector<save::TensorInFile> places;
  for (const auto& item : items) {
    places.push_back({item.tensor.in_file(), item.tensor.dtype,
                      item.whole() && item.tensor.strides.empty() ? item.tensor.shape
                                                                  : std::vector<int64_t>{item.end - item.begin}});
  }
  const std::string head = save::header_of(places, {{"format", "pt"}});
  file.write(head.data(), head.size());
  const auto number = static_cast<int64_t>(manifest.files.size());
  uint64_t bytes = head.size();
  for (const auto& item : items) {
    save::Xxh3 checksum;
    file.write(item.memory.const_data_ptr(), item.memory.nbytes(), checksum);
    bytes += item.memory.nbytes();
    save::SavedTensor& tensor = manifest.tensors.emplace_back(item.tensor);
    tensor.parts = {{number, item.begin, item.end, checksum.value()}};
  }
  manifest.files.push_back({name, bytes, save::xxh3(head.data(), head.size())});
}

}  // namespace

std::string optimizer_name(const Optimizer& optimizer) {
  constexpr const char* names[] = {"AdamW", "Adam", "SGD", "RMSprop", "none", "the user's"};
  return names[optimizer.index()];
}

// Replicas hold the same items: each writes an equal share of their bytes.
std::vector<Saving::Item> Saving::shared_out(std::vector<Item> items, int64_t index, int64_t count) {
  int64_t total = 0;
  for (const Item& item : items) total += static_cast<int64_t>(item.memory.nbytes());
  const auto cut = [&](int64_t i) {
    return static_cast<int64_t>(static_cast<double>(total) / static_cast<double>(count) * static_cast<double>(i));
  };
  const int64_t first = index == 0 ? 0 : cut(index), last = index + 1 == count ? total : cut(index + 1);
  std::vector<Item> mine;
  int64_t at = 0;
  for (Item& item : items) {
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

std::vector<Saving::Item> Saving::snapshot(const SaveOptions& options, const Outer* outer, Copy copy,
                                           const NamedTensors& generators) {
  Reducer& reducer = *impl_.reducer;
  const Mesh& mesh = reducer.team().mesh();
  const int rank = impl_.world.rank(), size = impl_.world.size();
  const int replica = rank / mesh.shard, part = rank % mesh.shard;
  const std::set<std::string> left_out(options.leave_out.begin(), options.leave_out.end());
  std::vector<Item> sharded, replicated, own;
  const auto add = [&](Kind kind, const std::string& name, const std::string& key, const at::Tensor& like,
                       const at::Tensor& memory, int64_t begin, const std::vector<int64_t>& strides, bool cut,
                       Item::ChangedBy changed_by) {
    Item item;
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
  for (const SavedSlot& slot : slots_of(impl_, updates_of(impl_))) {
    if (slot.kind == Kind::weight && left_out.contains(slot.name)) continue;
    const bool buffer = slot.kind == Kind::buffer;
    if (buffer && rank != 0) continue;  // rank 0's count, and another's may differ until the next step
    const at::Tensor memory = slot.memory.defined() ? slot.memory : plain(slot.owner).contiguous().view({-1});
    // The memory of an optimizer of ours is in nobody else's reach.
    const bool ours = slot.kind == Kind::optimizer && !impl_.updater->is_users();
    add(slot.kind, slot.name, slot.key, slot.owner, memory, slot.begin, slot.strides(), slot.sharded,
        ours ? Item::ChangedBy::step : Item::ChangedBy::anybody);
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
    Item item;
    const std::string dtype = dtype_name(value.scalar_type(), save::to_string(kind) + " '" + name + "'");
    item.tensor = {kind, name, key, dtype, value.sizes().vec(), {}, false, {}};
    item.memory = plain(value).contiguous().view({-1});
    item.end = item.memory.numel();
    own.push_back(std::move(item));
  };
  std::map<std::string, at::Tensor> parameters(impl_.parameters.begin(), impl_.parameters.end());
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
        one.place == OuterTensor::Place::piece && reducer.shards(reducer.row().state), Item::ChangedBy::anybody);
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
  std::vector<Item> mine = shared_out(std::move(sharded), replica, mesh.replicate);
  for (Item& item : shared_out(std::move(replicated), rank, size)) mine.push_back(std::move(item));
  for (Item& item : own) mine.push_back(std::move(item));
  if (copy == Copy::yes) {
    std::vector<at::Tensor*> now, later;
    for (Item& item : mine) (item.changed_by == Item::ChangedBy::step ? later : now).push_back(&item.memory);
    copies_.take(now, later);
  } else {
    for (Item& item : mine) item.memory = item.memory.to(at::kCPU).contiguous();
  }
  return mine;
}

save::Manifest Saving::manifest(const SaveOptions& options, const Outer* outer) const {
  using save::Json;
  save::Manifest manifest;
  const Reducer& reducer = *impl_.reducer;
  manifest.step = reducer.steps();
  manifest.samples = options.samples;
  manifest.ranks = impl_.world.size();
  Json::Object updates;
  for (const auto& [name, count] : updates_of(impl_)) updates.emplace_back(name, count);
  Json::Array order, group_lrs, extras;
  for (const std::string& name : reducer.order()) order.emplace_back(name);
  for (const double lr : impl_.updater->rates().group_lrs()) group_lrs.emplace_back(lr);
  for (const Extra& extra : options.extras) extras.emplace_back(extra.name);
  Json scale;
  if (impl_.scaler.on()) {
    scale = Json::Object{{"scale", impl_.scaler.scale()},
                         {"good_steps", impl_.scaler.good_steps()},
                         {"patience", impl_.scaler.patience()}};
  }
  manifest.engine = {{"optimizer", optimizer_name(impl_.updater->optimizer())},
                     {"lr", impl_.updater->rates().lr()},
                     {"group_lrs", std::move(group_lrs)},
                     {"loss_scale", std::move(scale)},
                     {"deterministic", impl_.options.deterministic},
                     {"virtual_ranks", impl_.options.virtual_ranks},
                     {"updates", std::move(updates)},
                     {"order", std::move(order)},
                     {"extras", std::move(extras)},
                     {"outer", outer != nullptr ? Json::parse(outer->text, "the optimizer's state") : Json()}};
  const Mesh& mesh = impl_.reducer->team().mesh();
  std::string names;
  for (const auto& [name, parameter] : impl_.parameters) {
    names += c10::str(name, " ", parameter.scalar_type(), " ", parameter.sizes(), "\n");
  }
  manifest.provenance = {{"plumb", PLUMB_VERSION},
                         {"torch", TORCH_VERSION},
                         {"written", now()},
                         {"strategy", impl_.options.strategy},
                         {"mesh", Json::Object{{"replicate", mesh.replicate}, {"shard", mesh.shard}}},
                         {"backend", impl_.world.backend()},
                         {"model", save::hex(save::xxh3(names.data(), names.size()))}};
  return manifest;
}

Where Saving::here(const std::string& what) const { return impl_.reducer->here(Where::Kind::step, what); }

// Rank 0 makes room on the disk, and everybody sees it: where the files go.
std::string Saving::prepare(const std::string& folder, const SaveOptions& options, const std::string& refusal) {
  writer_ = nullptr;
  const std::string steps = std::to_string(impl_.reducer->steps()), samples = std::to_string(options.samples);
  const Outcome mine = attempt([&] {
    road_of(impl_.world).pass(Point::save);
    impl_.reducer->check_between_steps("save()");
    if (impl_.in_step) throw Error("save() inside of a step; end_step() ends it");
    if (!refusal.empty()) throw Error(refusal);
    if (options.samples < 0 || options.keep < 0) {
      throw Error("save() with samples " + std::to_string(options.samples) + " and keep " +
                  std::to_string(options.keep) + "; both must be at least 0");
    }
    for (const std::string& name : options.leave_out) {
      const bool frozen = std::any_of(impl_.parameters.begin(), impl_.parameters.end(), [&](const auto& one) {
        return one.first == name && !one.second.requires_grad();
      });
      if (!frozen) throw Error("leave_out names '" + name + "', which is no frozen parameter of this engine");
    }
    return impl_.world.rank() == 0 ? steps + " " + samples + "/" + begin_files(folder) : steps;
  });
  try {
    const std::string first = share_outcome(impl_.world, mine, here("save()"))[0];
    const size_t blank = first.find(' '), slash = first.find('/');
    const std::string theirs = first.substr(0, blank), used = first.substr(blank + 1, slash - blank - 1);
    const std::string path = folder + first.substr(slash);
    const Outcome seen = attempt([&] {
      if (steps != theirs) throw Error("save() after " + steps + " steps, and rank 0 after " + theirs);
      if (samples != used) {
        throw Error("save() with samples " + samples + ", and rank 0 with " + used +
                    "; it is one cursor: how many all ranks together have used");
      }
      if (!save::is_folder(path)) {
        throw Error("'" + path +
                    "', which rank 0 made, is not to be seen here; checkpoints need a folder that all ranks share");
      }
      return std::string();
    });
    share_outcome(impl_.world, seen, here("save()"));
    return path;
  } catch (const RankFailed& failure) {
    if (writer_ != nullptr) writer_->abandon();
    throw SaveError(impl_.world.rank(), failure.what());
  } catch (...) {
    if (writer_ != nullptr) writer_->abandon();
    throw;
  }
}

// On rank 0: the name, in `folder`, of the folder that the files of a new checkpoint go to.
std::string Saving::begin_files(const std::string& folder) {
  // One name for one folder, however it is spelled.
  std::error_code ignored;
  save::make_folder(folder);
  const std::string root = std::filesystem::canonical(folder, ignored).string();
  const std::string& name = root.empty() ? folder : root;
  if (!writers_.contains(name)) writers_.emplace(name, std::make_unique<save::Writer>(folder));
  save::Writer& writer = *writers_.at(name);
  const std::string path = writer.begin();
  writer_ = &writer;
  return std::filesystem::path(path).filename().string();
}

void Saving::begin(const std::string& folder, const SaveOptions& options, const Outer* outer, Copy copy,
                   const NamedTensors& generators, const std::string& refusal) {
  advance(Wait::yes);
  saved_.clear();
  // A folder for each checkpoint would hold a file open for each.
  std::erase_if(writers_, [this](const auto& entry) { return entry.second.get() != writer_; });
  folder_ = folder;
  root_ = absolute(folder);
  const std::string path = prepare(root_, options, refusal);
  keep_ = options.keep;
  Taken taken;
  // From here on a failure is this rank's word when the ranks speak next.
  const std::string failure = attempt([&] {
                                if (impl_.units) impl_.units->begin_update();
                                road_of(impl_.world).pass(Point::snapshot);
                                taken = take(options, outer, copy, generators);
                                return std::string();
                              }).error;
  try {
    if (impl_.units) impl_.units->end_update();
  } catch (...) {  // the others are gone
    if (writer_ != nullptr) writer_->abandon();
    throw;
  }
  phase_ = Phase::writing;
  path_ = path;
  task_ = std::make_unique<Task>(
      [this, taken = std::move(taken), path, end = ending(), failure]() mutable {
        if (!failure.empty()) throw std::runtime_error(failure);
        before_writing();
        road_of(impl_.world).beside(Point::write);
        copies_.finish();
        return write(std::move(taken), path, end);
      },
      copy == Copy::no ? alone() : Task::Runs::beside);
}

std::string Saving::write_alone(const std::string& folder, int64_t samples) {
  return write(take({.samples = samples}, nullptr, Copy::no, {}), folder, ending());
}

// What this rank is to write, as it is now.
Saving::Taken Saving::take(const SaveOptions& options, const Outer* outer, Copy copy, const NamedTensors& generators) {
  at::NoGradGuard no_grad;
  std::deque<Bucket>& buckets = impl_.reducer->buckets();
  for (Bucket& bucket : buckets) bucket.lanes.begin_all(bucket.device());
  Taken taken{snapshot(options, outer, copy, generators), manifest(options, outer)};
  for (Bucket& bucket : buckets) bucket.lanes.end_all(bucket.device());
  return taken;
}

// The files of one rank, on the disk; the text of its manifest.
std::string Saving::write(Taken taken, const std::string& path, const std::string& end) {
  std::map<std::string, std::vector<Item>> files;
  for (Item& item : taken.items) files[file_of(item.tensor.kind)].push_back(std::move(item));
  taken.items.clear();
  std::deque<save::NewFile> written;
  for (const auto& [name, members] : files) {
    write_file(written.emplace_back(path + "/" + name + end), name + end, members, taken.manifest);
  }
  for (save::NewFile& file : written) file.flush();
  for (save::NewFile& file : written) file.finish();
  return taken.manifest.write();
}

// A rank that is waited for by nobody needs no thread for what it waits for itself.
Task::Runs Saving::alone() const { return impl_.world.size() > 1 ? Task::Runs::beside : Task::Runs::at_once; }

std::string Saving::ending() const {
  return "-" + numbered(impl_.world.rank()) + "-of-" + numbered(impl_.world.size()) + ".safetensors";
}

void Saving::go_on(Wait wait) {
  if (phase_ == Phase::writing) {
    const auto texts = together(impl_.world, *task_, wait, here("save()"));
    if (!texts) return;
    phase_ = Phase::committing;
    task_ = std::make_unique<Task>(
        [this, texts = impl_.world.rank() == 0 ? *texts : std::vector<std::string>{}] {
          road_of(impl_.world).beside(Point::commit);
          if (texts.empty()) return std::string();
          save::Manifest whole = save::Manifest::read(texts[0], "rank 0's part", save::Manifest::Coverage::some);
          for (size_t rank = 1; rank < texts.size(); ++rank) {
            whole.join(save::Manifest::read(texts[rank], "rank " + std::to_string(rank) + "'s part",
                                            save::Manifest::Coverage::some));
          }
          save::Manifest::read(whole.write(), "the new manifest");  // what nobody wrote is noticed now
          return writer_->commit(whole, keep_);
        },
        wait == Wait::yes ? alone() : Task::Runs::beside);
  }
  const auto texts = together(impl_.world, *task_, wait, here("save()"));
  if (!texts) return;
  rest();
  const std::string& root = absolute(folder_) == root_ ? folder_ : root_;
  saved_ = root + "/" + std::filesystem::path((*texts)[0]).filename().string();
}

// Nothing is under way.
void Saving::rest() {
  task_.reset();
  path_.clear();
  copies_.let_go();
  road_of(impl_.world).beside(Point::none);
}

void Saving::advance(Wait wait) {
  if (path_.empty()) return;
  std::string failure;
  try {
    return go_on(wait);
  } catch (const RankFailed& error) {
    failure = error.what();
  }
  rest();
  if (writer_ != nullptr) writer_->abandon();
  throw SaveError(impl_.world.rank(), failure);
}

std::string Saving::finish() {
  advance(Wait::yes);
  return saved_;
}

Saving::~Saving() {
  if (path_.empty()) return;
  task_->wait();
  const bool complete = phase_ == Phase::committing && task_->outcome().error.empty();
  task_.reset();
  if (writer_ == nullptr || complete) return;
  writer_->abandon();
  TORCH_WARN("plumb: a checkpoint into '", folder_, "' was under way when its engine ended, and is lost; call ",
             "engine.finish_save() first. Earlier ones are intact.");
}

}  // namespace plumb

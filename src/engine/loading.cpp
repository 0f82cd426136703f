#include "engine/loading.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "engine/filling.h"
#include "grad/mode.h"
#include "save/folder.h"
#include "save/xxh3.h"
#include "watch/road.h"

namespace plumb {

using save::Json;
using save::Kind;
using save::SavedTensor;

namespace {

std::string described(const std::string& dtype, const std::vector<int64_t>& shape) {
  return c10::str(dtype, " ", at::IntArrayRef(shape));
}

// Behind `path`, the name of the newest complete checkpoint there; empty where it is one itself.
std::string newest_behind(const std::string& path) {
  std::vector<std::string> skipped;
  const std::string found = save::newest_of(path, &skipped);
  for (const std::string& why : skipped)
    TORCH_WARN("plumb: a newer checkpoint than '", found, "' is passed over: ", why);
  return found.substr(path.size());
}

// Elements [begin, end) of a tensor whose memory may lie in another order here.
at::Tensor read_slot(Reads& reads, const save::Checkpoint& checkpoint, const SavedTensor& tensor,
                     const at::Tensor& like, int64_t begin, int64_t end) {
  SavedSlot slot;
  slot.owner = like;
  const std::vector<int64_t> live = slot.strides();
  if (live == tensor.strides || begin == end) return reads.add(tensor, begin, end);
  const auto in_order = [&](const at::Tensor& flat, const std::vector<int64_t>& strides) {
    return strides.empty() ? flat.view(tensor.shape) : flat.as_strided(tensor.shape, strides);
  };
  const at::Tensor saved = read_range(checkpoint, tensor, 0, tensor.numel());
  const at::Tensor ours = at::empty_like(saved);
  in_order(ours, live).copy_(in_order(saved, tensor.strides));
  return ours.narrow(0, begin, end - begin).clone();
}

}  // namespace

std::string LoadInfo::table() const {
  std::string text;
  for (const Mismatch& one : mismatches) {
    const char* kind = one.kind == Mismatch::Kind::missing ? "missing   "
                       : one.kind == Mismatch::Kind::extra ? "extra     "
                                                           : "reshaped  ";
    text += kind + one.what;
    if (!one.saved.empty()) text += "  saved " + one.saved;
    if (!one.live.empty()) text += "  here " + one.live;
    text += '\n';
  }
  return text;
}

Loading::Loading(Engine::Impl& impl, const std::string& path, const LoadOptions& options, OuterState outer,
                 const std::string& refusal)
    : impl_(impl), options_(options) {
  const TrainingMode training;
  at::NoGradGuard no_grad;
  const Where where = impl.reducer->here(Where::Kind::step, "load()");
  info_.path = path + begin_loading(impl, where, refusal, [&] { return newest_behind(path); });
  const auto on_all_ranks = [&](std::function<std::string()> work) {
    return on_every_rank(impl.world, std::move(work), where);
  };
  const auto manifests = on_all_ranks([this] {
    checkpoint_ = std::make_unique<save::Checkpoint>(info_.path);
    const std::string text = checkpoint_->manifest().write();
    return save::hex(save::xxh3(text.data(), text.size()));
  });
  const save::Manifest& manifest = checkpoint_->manifest();
  info_.step = manifest.step;
  info_.samples = manifest.samples;
  // Each rank compares with its own engine; what one of them finds, all of them throw.
  on_all_ranks([&, outer] {
    if (std::any_of(manifests.begin(), manifests.end(), [&](const auto& one) { return one != manifests[0]; })) {
      throw Error("the ranks see different checkpoints at '" + info_.path + "'");
    }
    compare(outer);
    return std::string();
  });
  std::vector<std::string> order;
  for (const Json& name : manifest.engine_field("order").array("'order'"))
    order.push_back(name.text("a name of 'order'"));
  if (manifest.step > 0) impl.reducer->arrange(order);
  impl.updater->make_room(impl.reducer->buckets(), updates_by_sink());
  on_all_ranks([&] {
    read();
    return std::string();
  });
}

std::vector<int64_t> Loading::updates_by_sink() const {
  std::vector<int64_t> all;
  for (const Sink& sink : impl_.reducer->sinks()) {
    const auto found = updates_.find(sink.name);
    all.push_back(found == updates_.end() ? 0 : found->second);
  }
  return all;
}

// The saved tensor for a place of this engine, if they agree.
void Loading::expect(const SavedTensor* saved, const SavedSlot& slot) {
  const std::string dtype = dtype_name(slot.dtype(), title_of(slot));
  if (saved == nullptr) {
    info_.mismatches.push_back({Mismatch::Kind::missing, title_of(slot), "", described(dtype, slot.shape())});
  } else if (saved->dtype != dtype || saved->shape != slot.shape()) {
    info_.mismatches.push_back({Mismatch::Kind::reshaped, title_of(slot), described(saved->dtype, saved->shape),
                                described(dtype, slot.shape())});
  }
}

void Loading::compare(OuterState outer) {
  const save::Manifest& manifest = checkpoint_->manifest();
  std::map<std::string, const SavedTensor*> saved;  // by title
  for (const SavedTensor& tensor : manifest.tensors) saved[tensor.title()] = &tensor;
  std::set<std::string> known;
  const auto take = [&](const SavedSlot& slot) {
    known.insert(title_of(slot));
    const auto found = saved.find(title_of(slot));
    expect(found == saved.end() ? nullptr : found->second, slot);
  };
  const auto mismatch = [&](Mismatch::Kind kind, const std::string& what, const std::string& there = "",
                            const std::string& here = "") { info_.mismatches.push_back({kind, what, there, here}); };
  const auto lookup = [&](Kind kind, const std::string& name, const at::Tensor& like, at::ScalarType dtype,
                          const std::string& key = "") {
    SavedSlot slot;
    slot.kind = kind;
    slot.name = name;
    slot.key = key;
    slot.owner = like;
    slot.memory = at::empty({0}, dtype);
    take(slot);
  };

  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : impl_.parameters) {
    parameters[name] = parameter;
    lookup(Kind::weight, name, parameter, parameter.scalar_type());
  }
  for (const auto& [name, buffer] : impl_.buffers) {
    if (buffer.defined()) lookup(Kind::buffer, name, buffer, buffer.scalar_type());
  }

  // The engine's own optimizer.
  const std::string optimizer = manifest.engine_field("optimizer").text("'optimizer'");
  const std::string mine = optimizer_name(impl_.updater->optimizer());
  const bool outers = mine == optimizer_name(NoOptimizer{}) || mine == optimizer_name(UserOptimizer{});
  const bool theirs = optimizer == optimizer_name(NoOptimizer{}) || optimizer == optimizer_name(UserOptimizer{});
  if (optimizer != mine && !(outers && theirs)) {
    mismatch(Mismatch::Kind::reshaped, "the optimizer", optimizer, mine);
  }
  std::set<std::string> trained;
  for (const Sink& sink : impl_.reducer->sinks()) trained.insert(sink.name);
  for (const auto& [name, count] : manifest.engine_field("updates").object("'updates'")) {
    const int64_t updates = count.integer("the updates of '" + name + "'");
    const auto found = parameters.find(name);
    if (found == parameters.end()) continue;  // its weight is extra already
    if (!trained.contains(name)) {
      mismatch(Mismatch::Kind::extra, "optimizer state of '" + name + "'", std::to_string(updates) + " updates",
               "frozen");
      continue;
    }
    const at::Tensor& parameter = found->second;
    const Updater::Kept kept = impl_.updater->kept_of(parameter);
    bool whole = !mismatched(title_of(Kind::weight, name));
    for (const auto& [key, there] : kept.names) {
      if (!there) continue;
      lookup(Kind::optimizer, name, parameter, kept.dtype, key);
      whole = whole && !mismatched(title_of(Kind::optimizer, name, key));
    }
    // A parameter that an outer optimizer updates is counted only where it has a master or is updated in pieces. One whose
    // state does not fit begins anew: the first updates of moments that are zero are not those that a count says they are.
    if (mine != optimizer_name(NoOptimizer{}) && whole) updates_[name] = updates;
  }

  // Somebody else's.
  for (const SavedTensor& tensor : manifest.tensors) {
    if (tensor.kind != Kind::optimizer && tensor.kind != Kind::optimizer_value) continue;
    if (known.contains(tensor.title()) || outer == OuterState::none) continue;
    const auto found = parameters.find(tensor.name);
    if (found == parameters.end()) continue;
    if (tensor.kind == Kind::optimizer && tensor.shape != found->second.sizes().vec()) {
      mismatch(Mismatch::Kind::reshaped, tensor.title(), described(tensor.dtype, tensor.shape),
               c10::str(found->second.sizes()));
    } else if (mismatched("weight '" + tensor.name + "'")) {  // as of another dtype: one without the other is neither
      mismatch(Mismatch::Kind::reshaped, tensor.title(), described(tensor.dtype, tensor.shape), "no such weight");
    } else {
      outers_.push_back(&tensor);
    }
    known.insert(tensor.title());
  }
  const Json& text = manifest.engine_field("outer");
  if (outer == OuterState::taken) {
    if (text.is_null()) {
      mismatch(Mismatch::Kind::missing, "the state of the torch.optim optimizer");
    } else {
      outer_.text = text.write();
    }
  } else if (!text.is_null()) {
    mismatch(Mismatch::Kind::extra, "the state of a torch.optim optimizer");
  }

  // Extras, by name.
  std::set<std::string> asked, there;
  for (const Extra& extra : options_.extras) asked.insert(extra.name);
  for (const Json& name : manifest.engine_field("extras").array("'extras'")) there.insert(name.text("an extra's name"));
  for (const std::string& name : there) {
    if (!asked.contains(name)) mismatch(Mismatch::Kind::extra, "extra '" + name + "'");
  }
  for (const std::string& name : asked) {
    if (!there.contains(name)) mismatch(Mismatch::Kind::missing, "extra '" + name + "'");
  }
  for (const SavedTensor& tensor : manifest.tensors) {
    if (tensor.kind == Kind::extra || tensor.kind == Kind::generator) known.insert(tensor.title());
  }
  for (const SavedTensor& tensor : manifest.tensors) {
    if (!known.contains(tensor.title())) {
      mismatch(Mismatch::Kind::extra, tensor.title(), described(tensor.dtype, tensor.shape));
    }
  }

  // Settings.
  const bool scaled = !manifest.engine_field("loss_scale").is_null();
  if (scaled && !impl_.scaler.on()) mismatch(Mismatch::Kind::extra, "the loss scale");
  if (!scaled && impl_.scaler.on()) mismatch(Mismatch::Kind::missing, "the loss scale");
  const auto groups = manifest.engine_field("group_lrs").array("'group_lrs'").size();
  if (groups != impl_.options.groups.size()) {
    mismatch(Mismatch::Kind::reshaped, "the parameter groups", std::to_string(groups),
             std::to_string(impl_.options.groups.size()));
  }
  if (impl_.options.deterministic) {
    const int64_t shares = manifest.engine_field("virtual_ranks").integer("'virtual_ranks'");
    if (manifest.engine_field("deterministic").boolean("'deterministic'") && shares != impl_.options.virtual_ranks) {
      mismatch(Mismatch::Kind::reshaped, "virtual_ranks", std::to_string(shares),
               std::to_string(impl_.options.virtual_ranks));
    }
  }
  if (options_.strict && !info_.mismatches.empty()) {
    throw Error("the checkpoint '" + info_.path +
                "' does not fit this engine, and nothing was loaded (strict = false loads "
                "what fits; load_weights() takes the weights alone, in any dtype):\n" +
                info_.table());
  }
}

void Loading::read() {
  const save::Manifest& manifest = checkpoint_->manifest();
  road_of(impl_.world).pass(Point::read);
  Reads reads(*checkpoint_);
  std::map<std::string, const SavedTensor*> saved_by_title;
  for (const SavedTensor& tensor : manifest.tensors) saved_by_title[tensor.title()] = &tensor;
  const std::vector<SavedSlot> slots = slots_of(impl_, updates_);
  int64_t bytes = 0;
  for (const SavedSlot& slot : slots) {
    bytes += (slot.end - slot.begin) * static_cast<int64_t>(c10::elementSize(slot.dtype())) + 64;
  }
  reads.share(bytes);
  for (const SavedSlot& slot : slots) {
    const auto found = saved_by_title.find(title_of(slot));
    if (found == saved_by_title.end() || mismatched(title_of(slot))) continue;
    fillings_.push_back({slot, read_slot(reads, *checkpoint_, *found->second, slot.owner, slot.begin, slot.end)});
  }
  reads.share(0);  // what comes now is somebody else's to keep
  const bool pieces = impl_.updater->is_users();
  std::map<std::string, const Sink*> sinks;
  for (const Sink& sink : impl_.reducer->sinks()) sinks[sink.name] = &sink;
  const std::map<std::string, at::Tensor> parameters(impl_.parameters.begin(), impl_.parameters.end());
  for (const SavedTensor* saved : outers_) {
    OuterTensor& one = outer_.tensors.emplace_back();
    one.parameter = saved->name;
    one.key = saved->key;
    if (saved->kind == Kind::optimizer_value) {
      one.value = reads.add(*saved, 0, saved->numel()).view(saved->shape);
      continue;
    }
    const at::Tensor& parameter = parameters.at(saved->name);
    const bool cut = pieces && sinks.contains(saved->name);  // what nobody trains is whole everywhere
    one.place = cut ? OuterTensor::Place::piece : OuterTensor::Place::whole;
    if (!cut) {
      one.value = view_in(read_slot(reads, *checkpoint_, *saved, parameter, 0, parameter.numel()), 0, parameter);
      continue;
    }
    const Sink& sink = *sinks.at(saved->name);
    const Range mine = overlap(sink.slot, parameter.numel(), impl_.reducer->layout().of(sink).updated);
    one.begin = std::clamp<int64_t>(mine.begin - sink.slot.offset, 0, parameter.numel());
    one.value = read_slot(reads, *checkpoint_, *saved, parameter, one.begin, one.begin + mine.size());
  }
  for (Generator& one : read_generators()) {
    const std::vector<at::Generator> ours = saved_generators();
    const auto found = std::find_if(ours.begin(), ours.end(), [&](const at::Generator& generator) {
      return one.name == c10::DeviceTypeName(generator.device().type(), /*lower_case=*/true);
    });
    if (found == ours.end()) {
      outer_generators_.push_back(std::move(one));
      continue;
    }
    if (!one.state.defined()) {
      at::Generator fresh = found->clone();
      fresh.set_current_seed(one.seed);
      one.state = fresh.get_state();
    }
    generators_.emplace_back(*found, one.state);
  }
  for (const SavedTensor& tensor : manifest.tensors) {
    if (tensor.kind == Kind::extra) {
      extras_[tensor.name].emplace_back(tensor.key, reads.add(tensor, 0, tensor.numel()).view(tensor.shape));
    } else if (tensor.kind == Kind::generator && impl_.world.rank() == 0) {
      reads.verify(tensor);  // of ranks that are no more
    }
  }
  reads.run();
}

std::vector<Loading::Generator> Loading::read_generators() const {
  const save::Manifest& manifest = checkpoint_->manifest();
  const int rank = impl_.world.rank();
  std::vector<Generator> all;
  for (const SavedTensor& first : manifest.tensors) {
    if (first.kind != Kind::generator || first.key != "rank 0") continue;
    Generator& one = all.emplace_back(Generator{first.name, {}, 0});
    const SavedTensor* own = manifest.find(Kind::generator, first.name, "rank " + std::to_string(rank));
    if (own != nullptr) {
      one.state = read_range(*checkpoint_, *own, 0, own->numel());
      continue;
    }
    const at::Tensor bits = read_range(*checkpoint_, first, 0, first.numel());
    save::Xxh3 hash;
    hash.add(bits.const_data_ptr(), bits.nbytes());
    hash.add(&rank, sizeof(rank));
    one.seed = hash.value();
  }
  return all;
}

bool Loading::mismatched(const std::string& what) const {
  return std::any_of(info_.mismatches.begin(), info_.mismatches.end(),
                     [&](const Mismatch& one) { return one.what == what; });
}

void Loading::accept(const std::string& refusal) {
  const Where where = impl_.reducer->here(Where::Kind::step, "load()");
  const auto agree = [&](const std::function<std::string()>& work) {
    const Outcome mine = attempt(work);
    try {
      return share_outcome(impl_.world, mine, where);
    } catch (const RankFailed& failure) {
      throw Error(impl_.world.rank(), failure.what());
    }
  };
  // Some ranks alone may name extras: all of them hear how those went.
  const auto named = agree([&] {
    if (!refusal.empty()) throw Error(refusal);
    return std::string(options_.extras.empty() ? "" : "extras");
  });
  if (std::ranges::all_of(named, &std::string::empty)) return;
  std::vector<std::pair<const Extra*, NamedTensors>> before;
  try {
    agree([&] {
      for (const Extra& extra : options_.extras) {
        if (mismatched("extra '" + extra.name + "'")) continue;
        if (!extra.load) throw Error("the extra '" + extra.name + "' has no function to load with");
        // One that has no state yet has nothing to lose.
        attempt([&] {
          NamedTensors state = extra.save();
          for (auto& [key, value] : state) value = value.clone();
          before.emplace_back(&extra, std::move(state));
          return std::string();
        });
        extra.load(extras_[extra.name]);
      }
      return std::string();
    });
  } catch (const Error&) {
    for (const auto& [extra, state] : before) {
      attempt([&] {
        extra->load(state);
        return std::string();
      });
    }
    throw;
  }
}

void Loading::restore_settings() {
  const save::Manifest& manifest = checkpoint_->manifest();
  Rates& rates = impl_.updater->rates();
  const bool trains = !std::holds_alternative<NoOptimizer>(impl_.updater->optimizer()) && !impl_.updater->is_users();
  if (trains) {
    rates.set_lr(manifest.engine_field("lr").number("'lr'"));
    const auto& groups = manifest.engine_field("group_lrs").array("'group_lrs'");
    for (size_t i = 0; i < std::min(groups.size(), impl_.options.groups.size()); ++i) {
      const double lr = groups[i].number("'group_lrs'");
      if (rates.lr(static_cast<int>(i)) != lr) rates.set_lr(static_cast<int>(i), lr);
    }
  }
  const Json& scale = manifest.engine_field("loss_scale");
  if (impl_.scaler.on() && !scale.is_null()) {
    impl_.scaler.restore(scale.at("scale", "the loss scale").number("the loss scale"),
                         scale.at("good_steps", "the loss scale").integer("the loss scale's good steps"),
                         scale.at("patience", "the loss scale").integer("the loss scale's patience"));
  }
}

void Loading::apply() {
  const TrainingMode training;
  fill(impl_, fillings_, [this] {
    std::deque<Bucket>& buckets = impl_.reducer->buckets();
    impl_.updater->forget(buckets, updates_by_sink());
  });
  restore_settings();
  for (auto& [generator, state] : generators_) {
    std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  impl_.reducer->resume(info_.step);
  impl_.reducer->gradients_cleared();
}

}  // namespace plumb
